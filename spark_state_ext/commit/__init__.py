"""Commits: from changed rows to a new pointer, with uploads and snapshots."""

from __future__ import annotations
