"""Planning of queries, on the driver of a classic session or on a Spark Connect client."""

from __future__ import annotations
