"""Callers of a user's function: with frames, rows or tables."""

from __future__ import annotations
