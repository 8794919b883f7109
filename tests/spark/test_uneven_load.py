"""What the metrics of a real job report about a deliberately uneven load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from api_jobs import COUNTERS, ApiJob
from jobs import CLASSIC, keyed

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.spark_hashes import hash_keys
from spark_state_ext.reports.skew import HEAVY_RANGE, HOT_KEY, measure_loads
from spark_state_ext.worker.metrics import read
from tests.helpers.waiting import WAIT_S

pytestmark = pytest.mark.spark
BUCKETS = 4


@CLASSIC
def test_metrics_find_a_heavy_range_and_a_hot_key_and_nothing_in_an_even_load(session: Any, tmp_path: Path) -> None:
    names = pa.array([f"key-{number}" for number in range(4_000)])
    bucket_of_name = BucketMap(BUCKETS).of(hash_keys([names]))
    heavy_names = names.filter(pa.array(bucket_of_name == 2))
    (hot_key,) = names.filter(pa.array(bucket_of_name == 1))[:1].to_pylist()
    # The loads: the keys of one bucket ten times; one key as often as all others together; each key once.
    for kind, bucket, keys in (
        (HEAVY_RANGE, 2, [*names.to_pylist(), *np.repeat(heavy_names.to_pylist(), 9).tolist()]),
        (HOT_KEY, 1, [*names.to_pylist(), *[hot_key] * 4_000]),
        (None, None, names.to_pylist()),
    ):
        folder = tmp_path / str(kind)
        folder.mkdir()
        job = ApiJob(session, "arrow", folder, COUNTERS["arrow"], options={"buckets": BUCKETS})
        with job.configured():
            job.feed(keyed(*keys))
            query = job.writer().trigger(availableNow=True).start()
            try:
                assert query.awaitTermination(WAIT_S)
            finally:
                query.stop()
        (load,) = measure_loads(read(folder / "local"))
        findings = [(finding.kind, finding.bucket) for finding in load.findings]
        assert findings == ([(kind, bucket)] if kind else []), load.findings
        assert sum(load.buckets["rows"].to_pylist()) == len(keys)
        top_key_rows = {HEAVY_RANGE: 10, HOT_KEY: 4_001, None: 1}[kind]
        assert max(load.buckets["top_key_rows"].to_pylist()) == top_key_rows
