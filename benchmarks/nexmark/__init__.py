"""The Nexmark benchmark: persons, auctions and bids, and queries over them."""

from __future__ import annotations
