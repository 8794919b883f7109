"""Snapshots that belong to the user, and how jobs start from them: taking, reading, claiming and giving back."""
