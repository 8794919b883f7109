"""The bridge from Spark's tasks to the engine."""

from __future__ import annotations
