"""Checkpoint files in any fsspec file system: folders, reading and writing of formats, retention, operator files."""

from __future__ import annotations
