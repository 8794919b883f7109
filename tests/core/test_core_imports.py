"""The core does not need PySpark."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.waiting import WAIT_S

_SCRIPT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
import arrow_schemas, spark_state_ext, spark_state_ext.store, spark_state_ext.engine.bucket, spark_state_ext.ownership.lease
import spark_state_ext.files.operator_catalog, spark_state_ext.errors
assert not any(name.split(".")[0] in ("pyspark", "py4j", "pandas") for name in sys.modules)
try:
    spark_state_ext.ArrowState
except ModuleNotFoundError as error:
    print(error)
"""


def test_the_core_imports_without_pyspark() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pyspark" in done.stdout, "ArrowState raises an error that names PySpark, but only when it is used"
