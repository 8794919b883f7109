"""Who may write an operator's state: the lease."""

from __future__ import annotations
