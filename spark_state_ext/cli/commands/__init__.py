"""One module for each command: its arguments, and what it prints. A module is imported when its command is called."""

from __future__ import annotations
