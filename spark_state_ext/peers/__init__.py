"""Fetches pieces of snapshots from the standby services of other hosts, over Arrow Flight."""

from __future__ import annotations
