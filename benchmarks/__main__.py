"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import (
    async_commit,
    big_bucket,
    buckets,
    growth,
    import_native,
    initial_state,
    keyed_count,
    lazy_restore,
    live,
    paired,
    reading,
    rescale,
    restore,
    savepoint,
    standby_assignment,
    standby_following,
    store,
    vectorised,
)
from benchmarks.nexmark import bench as nexmark
from benchmarks.peers import compare as peers
from benchmarks.report import RESULTS, BenchmarkError, Report
from benchmarks.suite import QUICK_RESULTS, run_all


@dataclass(frozen=True)
class _Benchmark:
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Path], Report]


_BENCHMARKS = {
    "keyed_count": _Benchmark(
        "the same per-key pandas function on Spark's own state and on Arrow state",
        keyed_count.add_arguments,
        keyed_count.run,
    ),
    "vectorised": _Benchmark(
        "keyed count and sum against Spark's own JVM aggregation, in two sizes, in every API",
        vectorised.add_arguments,
        vectorised.run,
    ),
    "growth": _Benchmark(
        "batches of one size over ever more keys of state: time, memory, bytes written",
        growth.add_arguments,
        growth.run,
    ),
    "buckets": _Benchmark(
        "batches, and first batches of new workers, with ever more buckets, beside Spark's own operator",
        buckets.add_arguments,
        buckets.run,
    ),
    "nexmark": _Benchmark(
        "queries of the Nexmark benchmark, in our form and in those that Spark has", nexmark.add_arguments, nexmark.run
    ),
    "peers": _Benchmark(
        "other stream processors with Python, and storage engines alone, on the keyed count",
        peers.add_arguments,
        peers.run,
    ),
    "store": _Benchmark("the local store against one LMDB entry per key", store.add_arguments, store.run),
    "restore": _Benchmark(
        "from an empty disk to the first lookup, beside cp and Spark's RocksDB", restore.add_arguments, restore.run
    ),
    "lazy_restore": _Benchmark(
        "from an empty disk to the first lookup, with a snapshot in a store elsewhere: lazily, and fetched whole",
        lazy_restore.add_arguments,
        lazy_restore.run,
    ),
    "reading": _Benchmark(
        "state read from its files: one key by a process that has just begun, and a scan beside PyArrow's own reader",
        reading.add_arguments,
        reading.run,
    ),
    "async_commit": _Benchmark(
        "a job with its state on a slow object store against a local root, and with a store that hangs",
        async_commit.add_arguments,
        async_commit.run,
    ),
    "big_bucket": _Benchmark(
        "gigabytes into one bucket in one batch, and the memory that takes", big_bucket.add_arguments, big_bucket.run
    ),
    "import_native": _Benchmark(
        "importing a job on Spark's own operator, beside Spark's own reader of its state",
        import_native.add_arguments,
        import_native.run,
    ),
    "initial_state": _Benchmark(
        "a savepoint made of a table and read back, beside Spark's sorted parquet files of the same rows",
        initial_state.add_arguments,
        initial_state.run,
    ),
    "savepoint": _Benchmark(
        "native savepoints of running queries with small and large states, and a query that starts from one",
        savepoint.add_arguments,
        savepoint.run,
    ),
    "rescale": _Benchmark(
        "a query started from a savepoint with twice its buckets, beside one with as many and one rewritten first",
        rescale.add_arguments,
        rescale.run,
    ),
    "live": _Benchmark(
        "another process asks a running job for keys: how long that takes, and what the job notices",
        live.add_arguments,
        live.run,
    ),
    "standby_assignment": _Benchmark(
        "which host keeps which standby replica, decided by every host while hosts come and go, and its requests",
        standby_assignment.add_arguments,
        standby_assignment.run,
    ),
    "standby_following": _Benchmark(
        "a host that follows a bucket: its processor time beside that of the commits, and what the active notices",
        standby_following.add_arguments,
        standby_following.run,
    ),
    "paired": _Benchmark(
        "two commits of the library on the same benchmarks, in turns", paired.add_arguments, paired.run
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit status: 0 all bars met, 1 some not, 2 it failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["all"]:
        return run_all(given[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures speed and memory against the alternatives, in one run, on the same input, with equal "
        "answers checked; `all` runs them all. "
        "Exit status: 0 when all bars are met, 1 when some are not, 2 when the benchmark failed.",
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="BENCHMARK")
    for name, benchmark in _BENCHMARKS.items():
        command = commands.add_parser(
            name,
            help=benchmark.help,
            description=benchmark.help,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.add_argument(
            "--results", type=Path, metavar="DIR", help="folder for the result file; of --quick ./benchmark-results"
        )
        command.add_argument(
            "--work-dir", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR", help="folder for scratch files"
        )
        benchmark.add_arguments(command)
    options = parser.parse_args(given)
    if options.results is None:
        # As in the suite: small sizes do not take the place of the committed results.
        options.results = QUICK_RESULTS if getattr(options, "quick", False) else RESULTS
    options.work_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"benchmark-{options.name}-", dir=options.work_dir) as folder:
        try:
            report = _BENCHMARKS[options.name].run(options, Path(folder))
            print(report.table())
            print(f"\nresult file: {report.write(options.results)}")
        except BenchmarkError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except Exception:
            # Python's own exit status for it is 1, which says here that a bar is not met.
            traceback.print_exc()
            return 2
    # Without a promise there is none to break.
    return 0 if report.met or not report.bars else 1


if __name__ == "__main__":
    sys.exit(main())
