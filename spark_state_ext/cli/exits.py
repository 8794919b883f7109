"""Exit codes of commands. `docs/operating/commands.md` has them for users."""

from __future__ import annotations

__all__ = ["BUG", "DONE", "INTERRUPTED", "NO", "NOBODY_READS", "REFUSED", "WRONG_CALL"]

# It was done, and the answer is yes, or nothing was found.
DONE = 0
# It was done, and the answer is no: something is damaged, differs, is not there, or is to be changed.
NO = 1
# It cannot be done so: an unknown option, or an argument that cannot work (`UsageError`).
WRONG_CALL = 2
# It was refused, or failed: any other `StateError`.
REFUSED = 3
# An exception that nobody foresaw: its traceback is printed.
BUG = 70
# As a shell has it of a program that SIGINT ended.
INTERRUPTED = 130
# As a shell has it of a program that SIGPIPE ended: who reads the output has gone.
NOBODY_READS = 141
