"""Rows on their way: packed into payloads before Spark's shuffle, output unpacked behind the operator."""

from __future__ import annotations
