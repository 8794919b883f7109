"""The savepoint matrix on real Spark: one line of JSON for each case.

``PYTHONPATH=.:tests/core:tests/cluster python tests/spark/savepoint_runs.py`` runs
{no_claim, claim} × {native, canonical, checkpoint} × {disk, s3} × {nothing, moved, deleted, killed, twice}. ``--only`` takes
parts of names: ``--only claim-native s3-moved``. The exit status is 1 if a result differs from the batch computation, or if a
file was deleted that must be kept, or kept that must be deleted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from killed_jobs import PROVIDERS
from savepoint_cases import CASES, COVERING, SHORT, WHOLE, Case, Lengths
from savepoint_job import create_session
from savepoint_trial import Trial

from tests.helpers.object_store import s3_server

# The test server scans all objects of earlier cases at each listing. No case needs the stores of another one.
CASES_PER_SESSION = 6


def _run_case(spark: Any, provider: str, case: Case, lengths: Lengths, folder: Path, server: Any) -> dict[str, Any]:
    if case.meaningless:
        return {"case": case.name, "verdict": "nothing to run", "because": case.meaningless}
    began_s = time.monotonic()
    try:
        line = Trial(spark, provider, case, lengths, folder, server).run()
    except Exception as error:
        # A case that fails is reported in its line, and the other cases still run.
        traceback.print_exc()
        line = {"case": case.name, "equal": False, "verdict": "WRONG", "wrong": [f"{type(error).__name__}: {error}"]}
    return line | {"seconds": round(time.monotonic() - began_s, 1)}


def _run_cases(
    cases: Sequence[Case], cores: int, provider: str, lengths: Lengths, folder: Path
) -> Iterator[dict[str, Any]]:
    """Run cases that share a session and a server, and yield the line of each."""
    with s3_server() as server:
        spark = create_session(cores, provider)
        try:
            for case in cases:
                line = _run_case(spark, provider, case, lengths, folder / case.name, server)
                yield line
                if line["verdict"] != "WRONG":
                    shutil.rmtree(folder / case.name, ignore_errors=True)
        finally:
            spark.stop()


def main() -> int:
    """Run the chosen cases; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="run the cases whose name has one of these parts"
    )
    parser.add_argument("--covering", action="store_true", help="run a few cases that cover every pair of parts")
    parser.add_argument(
        "--short",
        action="store_true",
        help="run only a few batches of each, too few for clean-up to delete anything",
    )
    parser.add_argument("--cores", type=int, default=2, help="task slots")
    parser.add_argument(
        "--provider", choices=list(PROVIDERS), default="rocksdb", help="the provider of Spark's own state"
    )
    parser.add_argument("--folder", type=Path, help="keep the folders of failed cases here; created if absent")
    arguments = parser.parse_args()
    chosen = COVERING if arguments.covering else CASES
    cases = [
        case for case in chosen if not arguments.only or any(f"-{part}-" in f"-{case.name}-" for part in arguments.only)
    ]
    if not cases:
        parser.error(f"no case has one of the parts {arguments.only}")
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    lengths = SHORT if arguments.short else WHOLE
    all_good, ran = True, 0
    with tempfile.TemporaryDirectory(prefix="matrix-", ignore_cleanup_errors=True) as temporary:
        folder = Path(tempfile.mkdtemp(prefix="matrix-", dir=arguments.folder)) if arguments.folder else Path(temporary)
        for first in range(0, len(cases), CASES_PER_SESSION):
            group = cases[first : first + CASES_PER_SESSION]
            for line in _run_cases(group, arguments.cores, arguments.provider, lengths, folder.resolve()):
                print(json.dumps(line), flush=True)
                all_good &= line["verdict"] != "WRONG"
                ran += "seconds" in line
    print(json.dumps({"cases": len(cases), "ran": ran, "verdict": "all as they must be" if all_good else "WRONG"}))
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
