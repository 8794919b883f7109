"""Options that benchmarks share."""

from __future__ import annotations

import argparse

__all__ = ["add_buckets", "add_memory", "add_quick", "add_seed", "add_spark"]


def add_seed(parser: argparse.ArgumentParser, of: str = "the events") -> None:
    """Seed of whatever is made."""
    parser.add_argument("--seed", type=int, default=7, metavar="N", help=f"seed of {of}")


def add_memory(parser: argparse.ArgumentParser, memory: str) -> None:
    """Heap of Spark's JVM."""
    parser.add_argument("--memory", default=memory, metavar="SIZE", help="heap of Spark")


def add_spark(parser: argparse.ArgumentParser, memory: str) -> None:
    """What a Spark session is made with."""
    parser.add_argument("--cores", type=int, default=2, metavar="N", help="cores, and shuffle partitions")
    add_memory(parser, memory)


def add_buckets(parser: argparse.ArgumentParser, buckets: int | None = 4) -> None:
    """Number of buckets of `ArrowState`."""
    shown = "buckets of ArrowState" + (" (None: its default)" if buckets is None else "")
    parser.add_argument("--buckets", type=int, default=buckets, metavar="N", help=shown)


def add_quick(parser: argparse.ArgumentParser, what: str) -> None:
    """A short run, which gives no figures."""
    parser.add_argument("--quick", action="store_true", help=what)
