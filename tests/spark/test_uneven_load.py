"""Load that is uneven on purpose, in a real job: what its metrics tell of it."""

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
def test_a_heavy_range_a_hot_key_and_even_load(session: Any, tmp_path: Path) -> None:
    names = pa.array([f"key-{number}" for number in range(4_000)])
    of = BucketMap(BUCKETS).of(hash_keys([names]))
    heavy = names.filter(pa.array(of == 2))
    (hot,) = names.filter(pa.array(of == 1))[:1].to_pylist()
    # The keys of one bucket ten times; one key as often as all others together; each key once.
    for kind, bucket, keys in (
        (HEAVY_RANGE, 2, [*names.to_pylist(), *np.repeat(heavy.to_pylist(), 9).tolist()]),
        (HOT_KEY, 1, [*names.to_pylist(), *[hot] * 4_000]),
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
        found = [(it.kind, it.bucket) for it in load.findings]
        assert found == ([(kind, bucket)] if kind else []), load.findings
        assert sum(load.buckets["rows"].to_pylist()) == len(keys)
        most = {HEAVY_RANGE: 10, HOT_KEY: 4_001, None: 1}[kind]
        assert max(load.buckets["top_key_rows"].to_pylist()) == most
