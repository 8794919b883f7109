"""The command line of the demo: ``python -m benchmarks.demo``."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pandas as pd

from benchmarks.demo import dataset, proof, stream
from benchmarks.demo.flights import QUIET_DAYS, SHORT_MINUTES
from benchmarks.demo.server import Server, ServerError, check_reachable

MARKER = "made-by-the-demo"
KILL_AT = 0.4
MAX_STARTS = 6


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Stream the departures from New York in 2013 through Arrow state, kill the server in the "
        "middle of a batch, continue, and prove the result with pandas.",
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        help="folder for all files; one that an earlier demo made is emptied first (default: a temporary folder)",
    )
    parser.add_argument("--keep", action="store_true", help="do not remove the temporary folder")
    parser.add_argument(
        "--operator",
        choices=["arrow", "spark"],
        default="arrow",
        help="keep the state in Arrow (the default), or use Spark's own operator",
    )
    parser.add_argument("--rows", type=int, help="number of flights to use, from the beginning of the year (all)")
    parser.add_argument("--days-per-batch", type=int, default=28, help="days of flights in one file (28)")
    parser.add_argument("--buckets", type=int, default=8, help="buckets of the Arrow state (8)")
    parser.add_argument("--top", type=int, default=12, help="aircraft to print (12)")
    parser.add_argument(
        "--remote",
        metavar="URL",
        help="use the Connect server at this address, such as sc://host:15002, instead of starting and killing one; it "
        "must see the same --work-dir, and its Python must have this package",
    )
    options = parser.parse_args(argv)
    for name in ("rows", "days_per_batch", "buckets", "top"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def work_folder(path: Path | None) -> Path:
    """Return an empty folder: empty one that an earlier demo made, and refuse any other that is not empty."""
    if path is None:
        return Path(tempfile.mkdtemp(prefix="flights-demo-")).resolve()
    folder = path.resolve()
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise SystemExit(f"{folder} has files that the demo did not make: choose another --work-dir")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    return folder


def main(argv: list[str] | None = None) -> int:
    """Run the demo and return the exit code, which is 0 only if the proof holds."""
    options = parse_arguments(argv)
    # Turn SIGTERM into an exit, so that the server is killed in this case, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # PySpark warns once per import that it does not fully support this pandas. The demo tests this combination.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    if options.remote:
        try:
            check_reachable(options.remote)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 2
    folder = work_folder(options.work_dir)
    temporary = options.work_dir is None and not options.keep
    try:
        return demo(options, stream.Folders(folder), temporary)
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    finally:
        if temporary:
            shutil.rmtree(folder, ignore_errors=True)


def demo(options: argparse.Namespace, folders: stream.Folders, temporary: bool) -> int:
    """Write the input files, run the stream, compare and print its result, and return the exit code."""
    flights = dataset.load(options.rows)
    files = dataset.write(flights, folders.source, options.days_per_batch)
    print("Every scheduled departure from New York in 2013, followed aircraft by aircraft\n")
    print(f"  flights    {len(flights):,} of {flights['tailnum'].nunique():,} aircraft, in {files} files")
    print(f"  operator   {'ArrowState' if options.operator == 'arrow' else 'built into Spark'}")
    print(f"  folder     {folders.root}{' (removed at the end)' if temporary else ''}")

    cores = min(4, os.cpu_count() or 1)
    progress = stream.Progress(options.operator)
    if options.remote:
        print(f"  server     {options.remote.partition(';')[0]}", flush=True)
        streamed, seconds = run_remote(options, folders, cores, files, progress)
    else:
        with Server(folders.root / "server", cores, {"spark.driver.memory": "2g"}) as server:
            streamed, seconds = run_and_kill(options, folders, cores, files, progress, server)
    return report(options, folders, flights, streamed, seconds)


def run_and_kill(
    options: argparse.Namespace,
    folders: stream.Folders,
    cores: int,
    files: int,
    progress: stream.Progress,
    server: Server,
) -> tuple[pd.DataFrame, float]:
    """Run the stream on a server, kill the server within a batch, and run the stream to its end on a new server."""
    seconds = 0.0
    killed = False
    for _ in range(MAX_STARTS):
        server.start()
        with stream.connect(server.url, cores) as session:
            print(f"\nServer {server.starts}: Spark {session.version}, log in {server.log}\n", flush=True)
            progress.heading()
            started = time.monotonic()
            query = stream.start(session, folders, options.operator, options.buckets)
            mid_batch = MidBatch(folders, files, progress, server, never=killed)
            if not stream.follow(query, progress, until=mid_batch):
                if not killed:
                    break
                return stream.read_table(session, folders), seconds + time.monotonic() - started
            batch = folders.batches("offsets") - 1
            processes = server.kill()
            seconds += time.monotonic() - started
        killed = folders.batches("commits") <= batch
        print(f"\nSent SIGKILL to the {processes} processes of the server", end=" ")
        if killed:
            print(f"in the middle of batch {batch}.")
        else:
            print(f"just after batch {batch} had ended, so the next server is killed too.")
    raise ServerError(
        "could not kill the server within a batch: the batches are too short or too few; raise --rows or omit it"
    )


class MidBatch:
    """A callable: whether the query is well within a batch, and has processed about `KILL_AT` of the files or more."""

    def __init__(
        self,
        folders: stream.Folders,
        files: int,
        progress: stream.Progress,
        server: Server | None = None,
        never: bool = False,
    ) -> None:
        self.folders = folders
        self.progress = progress
        self.server = server
        self.never = never
        self.first = max(1, int(files * KILL_AT), folders.batches("commits"))
        self.batch: int | None = None
        self.since = 0.0

    def __call__(self) -> bool:
        """Return whether it holds. Spark plans a batch in the checkpoint before it runs, and commits it afterwards."""
        if self.server is not None:
            self.server.check()
        planned, done = self.folders.batches("offsets"), self.folders.batches("commits")
        if self.never or planned <= done or planned <= self.first:
            self.batch = None
            return False
        if self.batch != planned:
            self.batch, self.since = planned, time.monotonic()
        recent = self.progress.seconds[-3:]
        usual = sum(recent) / len(recent) if recent else 1.0
        return time.monotonic() - self.since > usual * 0.4


def run_remote(
    options: argparse.Namespace, folders: stream.Folders, cores: int, files: int, progress: stream.Progress
) -> tuple[pd.DataFrame, float]:
    """Run the stream on a server that the demo did not start: stop the query within a batch, then start it again."""
    with stream.connect(options.remote, cores) as session:
        print(f"\nSpark {session.version}\n", flush=True)
        progress.heading()
        started = time.monotonic()
        query = stream.start(session, folders, options.operator, options.buckets)
        if stream.follow(query, progress, until=MidBatch(folders, files, progress)):
            query.stop()
            print("\nThe query was stopped within a batch and is started again.\n", flush=True)
            query = stream.start(session, folders, options.operator, options.buckets)
            stream.follow(query, progress, until=MidBatch(folders, files, progress, never=True))
        return stream.read_table(session, folders), time.monotonic() - started


def report(
    options: argparse.Namespace,
    folders: stream.Folders,
    flights: pd.DataFrame,
    table: pd.DataFrame,
    seconds: float,
) -> int:
    """Print the table, the proof and the measurements; return the exit code."""
    streamed = proof.comparable(table)
    began = time.monotonic()
    computed = proof.expected(flights, pd.Timedelta(stream.WATERMARK_DELAY))
    errors = proof.differences(streamed, computed)

    final = proof.final_table(streamed[streamed["tailnum"] != proof.NO_TAIL])
    top_rows = final.head(options.top).assign(
        status=final["kind"].map(lambda kind: "quiet" if kind == "quiet" else "in service")
    )
    columns = {
        "tailnum": "aircraft",
        "status": "status",
        "airport": "last airport",
        "flown": "flown",
        "cancelled": "cancelled",
        "turnarounds": "turnarounds",
        "missing_legs": "missing legs",
        "worst_chain": "chained delay",
    }
    print(f"\nThe {len(top_rows)} aircraft with the longest chained delays, in minutes\n")
    print(top_rows[list(columns)].rename(columns=columns).to_string(index=False))
    quiet = int(final["kind"].eq("quiet").sum())
    print(
        f"\n  {len(final):,} aircraft: {len(final) - quiet:,} still in the state, {quiet:,} closed after more than "
        f"{QUIET_DAYS} days without a flight."
        f"\n  A turnaround takes at most {SHORT_MINUTES} minutes on the ground. All flights in the data leave New York."
        "\n  An aircraft that departs from another airport than the one where it last landed has a missing leg.\n"
    )
    print(f"  rows in     {len(flights):,} in {seconds:.1f} s: {len(flights) / seconds:,.0f} rows per second")
    quiet_rows = int(streamed["kind"].eq("quiet").sum())
    print(f"  rows out    {len(streamed):,}, of which {quiet_rows:,} say that an aircraft went quiet")
    if options.operator == "arrow":
        print(f"  state       {folders.state}")
    print(f"  checkpoint  {folders.checkpoint}")
    print(f"  table       {folders.table}\n")
    if errors:
        print("PROOF FAILED: the results of the stream and of pandas differ\n  " + "\n  ".join(errors), file=sys.stderr)
        return 1
    print(
        f"PROOF: all {len(streamed):,} rows equal those that pandas computes from the whole file at once "
        f"({time.monotonic() - began:.1f} s)."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
