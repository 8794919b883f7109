"""Services of a worker process: its identity, memory, threads, retries, spill files, open files and metrics."""

from __future__ import annotations
