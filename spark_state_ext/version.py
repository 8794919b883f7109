"""The one place where the version is written down."""

from __future__ import annotations

__version__ = "0.1.0"
