"""Packing rows into payloads before Spark's shuffle, and unpacking the output after the operator."""

from __future__ import annotations
