"""From changed rows to a pointer: uploads, snapshots, and what a commit waits for."""

from __future__ import annotations
