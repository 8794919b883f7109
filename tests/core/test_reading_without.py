"""Files can be read without this package: the example in `docs/reading.md` runs where it cannot be imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
from reading_support import Job
from test_reading import lived

from tests.helpers.waiting import WAIT_S

PAGE = Path(__file__).parents[2] / "docs" / "reading.md"
_BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("spark_state_ext", "arrow_schemas", "pyspark"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
"""
_WRITE_AND_CHECK = """
with pa.OSFile(sys.argv[1], "wb") as file, pa.ipc.new_file(file, layers.schema) as writer:
    rows = state.to_arrow_table() if hasattr(state, "to_arrow_table") else state.arrow()
    writer.write_table(rows.cast(layers.schema))
for name in ("spark_state_ext", "arrow_schemas"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} was imported")
"""


def test_the_documented_example_reads_a_query_folder_without_this_package(tmp_path: Path) -> None:
    job = lived(Job(tmp_path / "root", tmp_path), 30)
    [code] = re.findall(r"```python no-run: [^\n]*test_reading_without[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code, count = re.subn(r'^FOLDER = Path\(".*?"\)', f"FOLDER = Path({job.folder.root!r})", code, flags=re.MULTILINE)
    assert count == 1
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED + code + _WRITE_AND_CHECK, str(tmp_path / "found")],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model = job.models[28]
    assert done.stdout.split() == ["28", f"[({len(model)},)]"]
    rows = pa.ipc.open_file(str(tmp_path / "found")).read_all().to_pylist()
    assert {(row["key.name"], str(row["key.x"])): (row["state.count"], row["timeout_ms"]) for row in rows} == {
        (name, "nan" if x == "NaN" else str(x)): (row.count, row.timeout_ms) for (name, x), row in model.items()
    }
    job.close()
