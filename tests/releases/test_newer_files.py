"""An earlier release reads files of formats that it does not know: it raises a typed error and returns no rows."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.waiting import WAIT_S

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
WHEEL = next((HERE / "part-1").glob("*.whl"))
# Uses the module names of that release.
_READER = """
import sys
from pathlib import Path
from arrow_schemas.errors import StateError
from arrow_schemas.lineage import SNAPSHOT, CheckpointRef
from arrow_schemas.operator import OperatorFile
from spark_state_ext import checkpoint
from spark_state_ext.backend import Backend

folder = Path(sys.argv[1])
schema = OperatorFile.decode((folder / "operator_0.json").read_bytes(), "operator_0.json").row_schema()
files, ref = Backend(str(folder / "3")), CheckpointRef(2, f"{2:032x}")
for read in (
    lambda: checkpoint.read_header(files, ref, SNAPSHOT),
    lambda: list(checkpoint.read_checkpoint(files, ref, SNAPSHOT, schema, Path(sys.argv[2])).batches),
):
    try:
        print("read:", read())
    except StateError as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("number", [2, 3])
def test_an_earlier_release_refuses_snapshots_of_later_formats(number: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(tmp_path / "release")
    done = subprocess.run(
        [sys.executable, "-c", _READER, str(GOLDEN / f"snapshot-format-{number}"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "release")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    header, rows = done.stdout.splitlines()
    assert header.startswith("VersionSkewError"), header
    assert f"has file format {number}; this release reads up to 1" in header
    # It reads the end of the file first, and does not know that checksum.
    assert rows.startswith("CorruptFileError"), rows
    assert "no body record in its footer" in rows
