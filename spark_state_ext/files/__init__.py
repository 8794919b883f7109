"""Checkpoint files in any fsspec file system: folders, formats read and written, retention, the operator catalogue."""

from __future__ import annotations
