"""From a pointer and the backends' files to a whole local store."""

from __future__ import annotations
