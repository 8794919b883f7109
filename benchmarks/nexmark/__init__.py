"""The Nexmark benchmark: a generator of persons, auctions and bids, and streaming queries on these events."""

from __future__ import annotations
