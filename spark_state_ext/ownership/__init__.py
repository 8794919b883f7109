"""Ownership of a query folder: leases, claims and holds."""

from __future__ import annotations
