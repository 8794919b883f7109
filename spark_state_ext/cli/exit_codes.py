"""Exit codes of commands. `docs/operating/commands.md` lists them for users."""

from __future__ import annotations

__all__ = ["BROKEN_PIPE", "BUG", "DONE", "INTERRUPTED", "NO", "REFUSED", "WRONG_CALL"]

# The command succeeded, and its answer is yes, or it has nothing to report.
DONE = 0
# The command succeeded, and its answer is no: something is damaged, different, missing or must be changed.
NO = 1
# The call is wrong: an unknown option, or an argument that cannot work (`UsageError`).
WRONG_CALL = 2
# The command refused or failed: any other `StateError`.
REFUSED = 3
# An unexpected exception; its traceback is printed.
BUG = 70
# The code that a shell reports when SIGINT ended a program.
INTERRUPTED = 130
# The code that a shell reports when SIGPIPE ended a program: the reader of its output has gone.
BROKEN_PIPE = 141
