"""The operators need neither PySpark nor the sketches' package."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.waiting import WAIT_S

_SCRIPT = """
import sys
for name in ("pyspark", "py4j", "datasketches"):
    sys.modules[name] = None
import spark_state_ext.operators.aggregate, spark_state_ext.operators.deduplicate
import spark_state_ext.operators.sessionize, spark_state_ext.operators.top_k
from spark_state_ext import Agg
print(Agg.approx_count_distinct("value"))
"""


def test_the_operators_import_without_pyspark() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "approx_count_distinct" in done.stdout
