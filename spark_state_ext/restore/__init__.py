"""Restore a local store from a pointer and the backends' files."""

from __future__ import annotations
