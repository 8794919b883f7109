"""What packages that extend this one test themselves with: contracts of backends and local stores. Needs pytest."""

from __future__ import annotations

__all__ = ["WAIT_S"]

# How long anything is waited for. That never decides whether a contract is kept: it ends what would hang.
WAIT_S = 600
