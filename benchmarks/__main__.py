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
        "the same pandas function for each key, on Spark's own state and on Arrow state",
        keyed_count.add_arguments,
        keyed_count.run,
    ),
    "vectorised": _Benchmark(
        "a count and sum by key in each of our APIs, against Spark's own aggregation in the JVM, in two sizes",
        vectorised.add_arguments,
        vectorised.run,
    ),
    "growth": _Benchmark(
        "time, memory and bytes written of equally large batches, while the state grows",
        growth.add_arguments,
        growth.run,
    ),
    "buckets": _Benchmark(
        "batches, and first batches of new workers, with more and more buckets, against Spark's own operator",
        buckets.add_arguments,
        buckets.run,
    ),
    "nexmark": _Benchmark(
        "queries of the Nexmark benchmark on Arrow state and in the forms that Spark has for them",
        nexmark.add_arguments,
        nexmark.run,
    ),
    "peers": _Benchmark(
        "the count and sum by key in other stream processors with Python, and in storage engines alone",
        peers.add_arguments,
        peers.run,
    ),
    "store": _Benchmark(
        "the local store against a store with one LMDB entry for each key", store.add_arguments, store.run
    ),
    "restore": _Benchmark(
        "time from an empty disk to the first lookup, against cp and Spark's RocksDB",
        restore.add_arguments,
        restore.run,
    ),
    "lazy_restore": _Benchmark(
        "time from an empty disk to the first lookup, if the snapshot is fetched lazily, from a peer, or as a whole",
        lazy_restore.add_arguments,
        lazy_restore.run,
    ),
    "reading": _Benchmark(
        "reading state from its files: one key in a new process, and a scan against PyArrow's own reader",
        reading.add_arguments,
        reading.run,
    ),
    "async_commit": _Benchmark(
        "a job with its state in a slow object store against one with a local root, and a job with a store that hangs",
        async_commit.add_arguments,
        async_commit.run,
    ),
    "big_bucket": _Benchmark(
        "memory that workers need for gigabytes of rows of one bucket in one batch",
        big_bucket.add_arguments,
        big_bucket.run,
    ),
    "import_native": _Benchmark(
        "importing a job from Spark's own operator, against Spark's own reader of the same state",
        import_native.add_arguments,
        import_native.run,
    ),
    "initial_state": _Benchmark(
        "making a savepoint of a table, against Spark's sorted Parquet files of the same rows",
        initial_state.add_arguments,
        initial_state.run,
    ),
    "savepoint": _Benchmark(
        "native savepoints of running queries with a small and a large state, and a query that starts from one",
        savepoint.add_arguments,
        savepoint.run,
    ),
    "rescale": _Benchmark(
        "starting a query with twice a savepoint's buckets, against as many, and against rewriting the savepoint first",
        rescale.add_arguments,
        rescale.run,
    ),
    "live": _Benchmark(
        "how long another process waits for a running job's state, and how much this slows the job down",
        live.add_arguments,
        live.run,
    ),
    "standby_assignment": _Benchmark(
        "time, requests and moved replicas of the standby assignment, while hosts come and go",
        standby_assignment.add_arguments,
        standby_assignment.run,
    ),
    "standby_following": _Benchmark(
        "processor time of following a bucket, against that of its commits, and how much these become slower",
        standby_following.add_arguments,
        standby_following.run,
    ),
    "paired": _Benchmark(
        "two commits of the library on the same benchmarks, alternating", paired.add_arguments, paired.run
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; return the exit status: 0 if all bars are met, 1 if some are not, 2 if it failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["all"]:
        return run_all(given[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure speed and memory against the alternatives in the same run and on the same input, and "
        "check that the answers are equal. `all` runs all of them but `lazy_restore` and `paired`, and with --quick "
        "fewer. "
        "Exit status: 0 if all bars are met, 1 if some are not, 2 if the benchmark failed.",
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
            "--results",
            type=Path,
            metavar="DIR",
            help="folder for the result file; if omitted, benchmarks/results, or ./benchmark-results with --quick",
        )
        command.add_argument(
            "--work-dir", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR", help="folder for scratch files"
        )
        benchmark.add_arguments(command)
    options = parser.parse_args(given)
    if options.results is None:
        # As in `run_all`, results of small sizes must not replace the committed ones.
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
            # Without this, Python would exit with 1, which here means that a bar is not met.
            traceback.print_exc()
            return 2
    # A benchmark without bars cannot miss one.
    return 0 if report.met or not report.bars else 1


if __name__ == "__main__":
    sys.exit(main())
