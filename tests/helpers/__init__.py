"""What tests share. Executors and child processes import it too: the repository's root is on their path (`conftest.py`)."""
