"""The matrix of savepoints on real Spark, a line of JSON a case.

``PYTHONPATH=.:tests/core:tests/cluster python tests/spark/savepoint_runs.py`` goes through
{no_claim, claim} × {native, canonical, checkpoint} × {disk, s3} × {nothing, moved, deleted, killed, twice}. ``--only`` takes
parts of names: ``--only claim-native s3-moved``. The exit status is 1 when a result was not equal to the batch computation,
or something was deleted that must not be, or not deleted that must.
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
from savepoint_job import session_of
from savepoint_trial import Trial

from tests.helpers.object_store import s3_server

# The server of the tests goes through all objects of earlier cases at each listing, and a case has stores of its own.
CASES_A_SESSION = 6


def _line(spark: Any, provider: str, case: Case, lengths: Lengths, folder: Path, server: Any) -> dict[str, Any]:
    if case.meaningless:
        return {"case": case.name, "verdict": "nothing to run", "because": case.meaningless}
    began_s = time.monotonic()
    try:
        line = Trial(spark, provider, case, lengths, folder, server).run()
    except Exception as error:
        # One case that fails is a line; the others are run all the same.
        traceback.print_exc()
        line = {"case": case.name, "equal": False, "verdict": "WRONG", "wrong": [f"{type(error).__name__}: {error}"]}
    return line | {"seconds": round(time.monotonic() - began_s, 1)}


def _lines(
    cases: Sequence[Case], cores: int, provider: str, lengths: Lengths, folder: Path
) -> Iterator[dict[str, Any]]:
    """Cases that share a session and a server."""
    with s3_server() as server:
        spark = session_of(cores, provider)
        try:
            for case in cases:
                line = _line(spark, provider, case, lengths, folder / case.name, server)
                yield line
                if line["verdict"] != "WRONG":
                    shutil.rmtree(folder / case.name, ignore_errors=True)
        finally:
            spark.stop()


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="cases whose name has one of these parts")
    parser.add_argument("--covering", action="store_true", help="a few cases in which any two parts come together")
    parser.add_argument(
        "--short", action="store_true", help="a few batches each, too few for anything to be cleaned up"
    )
    parser.add_argument("--cores", type=int, default=2, help="task slots")
    parser.add_argument("--provider", choices=list(PROVIDERS), default="rocksdb", help="of Spark's own state")
    parser.add_argument("--folder", type=Path, help="keeps the folders of cases that went wrong; made if absent")
    given = parser.parse_args()
    chosen = COVERING if given.covering else CASES
    cases = [case for case in chosen if not given.only or any(f"-{part}-" in f"-{case.name}-" for part in given.only)]
    if not cases:
        parser.error(f"no case has one of the parts {given.only}")
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    lengths = SHORT if given.short else WHOLE
    good, ran = True, 0
    with tempfile.TemporaryDirectory(prefix="matrix-", ignore_cleanup_errors=True) as temporary:
        folder = Path(tempfile.mkdtemp(prefix="matrix-", dir=given.folder)) if given.folder else Path(temporary)
        for first in range(0, len(cases), CASES_A_SESSION):
            few = cases[first : first + CASES_A_SESSION]
            for line in _lines(few, given.cores, given.provider, lengths, folder.resolve()):
                print(json.dumps(line), flush=True)
                good &= line["verdict"] != "WRONG"
                ran += "seconds" in line
    print(json.dumps({"cases": len(cases), "ran": ran, "verdict": "all as they must be" if good else "WRONG"}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
