"""The ways to call a user's function: with frames, rows or tables."""

from __future__ import annotations
