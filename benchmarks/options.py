"""Options that benchmarks share."""

from __future__ import annotations

import argparse

__all__ = ["add_buckets", "add_memory", "add_quick", "add_seed", "add_spark"]


def add_seed(parser: argparse.ArgumentParser, of: str = "the events") -> None:
    """Define `--seed`, the seed of the random input that `of` names."""
    parser.add_argument("--seed", type=int, default=7, metavar="N", help=f"seed of {of}")


def add_memory(parser: argparse.ArgumentParser, memory: str) -> None:
    """Define `--memory`, the heap of Spark's JVM."""
    parser.add_argument("--memory", default=memory, metavar="SIZE", help="heap of Spark's JVM")


def add_spark(parser: argparse.ArgumentParser, memory: str) -> None:
    """Define the options of a Spark session: `--cores` and `--memory`."""
    parser.add_argument("--cores", type=int, default=2, metavar="N", help="number of cores and of shuffle partitions")
    add_memory(parser, memory)


def add_buckets(parser: argparse.ArgumentParser, buckets: int | None = 4) -> None:
    """Define `--buckets`, the number of buckets of `ArrowState`."""
    help_text = "number of buckets of ArrowState" + (" (None: its default)" if buckets is None else "")
    parser.add_argument("--buckets", type=int, default=buckets, metavar="N", help=help_text)


def add_quick(parser: argparse.ArgumentParser, text: str) -> None:
    """Define `--quick`, a short run whose results are not meaningful figures."""
    parser.add_argument("--quick", action="store_true", help=text)
