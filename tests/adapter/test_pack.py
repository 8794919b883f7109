"""Packing without Spark: every row reaches its bucket through the shuffle or a spill file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from arrow_schemas.bucket_map import BY_STREAM_AND_PARTITION
from arrow_schemas.labels import find_buckets, label_bucket
from spark_state_ext.backends.registry import Backend
from spark_state_ext.engine.folders import operator_folder
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.source_partition import SourcePartition
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.errors import PartitionsChangedError, UsageError
from spark_state_ext.operators.arrays import KeyedRows
from spark_state_ext.spark.shuffle import pack as packing
from spark_state_ext.spark.shuffle.combine import Combiner
from spark_state_ext.spark.shuffle.pack import pack
from spark_state_ext.spark.shuffle.payload import decode, decode_partitions
from tests.helpers.jobs import job_of

BUCKETS = 3


def make_job(root: Path) -> Job:
    options = StateOptions(
        root=str(root / "root"),
        operator="packed",
        buckets=BUCKETS,
        local_dir=str(root / "local"),
        lease_ms=1_000,
        memory_bytes_max=1 << 20,
        backends=(Backend(str(root / "root")),),
    )
    return job_of(options, columns=("c0", "c1"))


@pytest.mark.parametrize("inline_bytes", [0, 60_000, 1 << 30])
def test_every_row_reaches_its_bucket_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int) -> None:
    # A third of the rows needs more than the second of these three sizes.
    monkeypatch.setattr(packing, "inline_share", lambda partition: inline_bytes)
    monkeypatch.setattr(packing, "_SPILLED_BYTES", 50_000)
    rng = np.random.default_rng(3)
    batches = [
        pa.record_batch(
            {
                "c0": pa.array(np.arange(at, at + 1_000)),
                "c1": pa.array([rng.bytes(100) for _ in range(1_000)], pa.binary()),
                "__hash": pa.array(rng.integers(-(2**63), 2**63, 1_000)),
            }
        )
        for at in range(0, 4_000, 1_000)
    ]
    job = make_job(tmp_path)
    files = operator_folder(job)
    seen: list[pa.RecordBatch] = []
    sent = [0] * BUCKETS
    for packed in pack(job.to_plain(), iter(batches)):
        for label, payload in zip(
            packed.column("bucket").to_pylist(), packed.column("payload").to_pylist(), strict=True
        ):
            bucket = label_bucket(label)
            sent[bucket] += len(payload) if payload[:1] == b"A" else 0
            for rows in decode(payload, lambda name, start, length: files.get_range(name, start, start + length)):
                hashes = rows.column("__hash").to_numpy().view(np.uint64)
                assert (find_buckets(hashes, BUCKETS) == bucket).all()
                seen.append(rows)
    assert max(sent) <= inline_bytes
    rows_received = pa.Table.from_batches(seen).sort_by("c0")
    assert rows_received.equals(pa.Table.from_batches(batches))
    stored = list((tmp_path / "root").rglob("*.payloads"))
    assert bool(stored) == (inline_bytes < 1 << 30)
    assert (sum(sent) > 0) == (inline_bytes > 0)


def test_a_large_row_among_small_ones_goes_to_a_spill_file(tmp_path: Path) -> None:
    values = [b"small"] * 2_000
    values[1_000] = bytes(64 << 20)
    rows = pa.record_batch(
        {
            "c0": pa.array(np.arange(2_000)),
            "c1": pa.array(values, pa.binary()),
            "__hash": pa.array(np.zeros(2_000, dtype=np.int64)),
        }
    )
    job = make_job(tmp_path)
    files = operator_folder(job)
    payloads = [p for packed in pack(job.to_plain(), iter([rows])) for p in packed.column("payload").to_pylist()]
    assert max(map(len, payloads)) < 1 << 20
    assert sum(payload[:1] == b"S" for payload in payloads) == 1
    rows_received = [
        batch
        for payload in payloads
        for batch in decode(payload, lambda name, start, length: files.get_range(name, start, start + length))
    ]
    assert pa.Table.from_batches(rows_received).equals(pa.Table.from_batches([rows]))


def test_every_attempt_at_a_packing_task_sends_the_same_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise Spark fails the job if it runs a packing task again because an executor was lost."""
    context = SimpleNamespace(partitionId=lambda: 0)
    monkeypatch.setattr(packing, "TaskContext", SimpleNamespace(get=lambda: context))
    rows = pa.record_batch(
        {
            "c0": pa.array(np.arange(2_000)),
            "c1": pa.array([f"{number}" * (number % 7) for number in range(2_000)]),
            "__hash": pa.array(np.random.default_rng(3).integers(-(2**63), 2**63, 2_000)),
        }
    )
    sent, again = (list(pack(make_job(tmp_path).to_plain(), iter([rows]))) for _ in range(2))
    assert sum(batch.num_rows for batch in sent) == 2 * BUCKETS
    assert [batch.to_pydict() for batch in sent] == [batch.to_pydict() for batch in again]


@pytest.mark.parametrize(
    ("times", "latest"),
    [
        (["2024-01-01", "2024-01-02"], "2024-01-02"),
        (["2024-01-01", "9999-12-01"], None),
        (["0001-01-01", "0001-01-02"], None),
        (["0001-01-01", "1969-12-31"], "1969-12-31"),
        (["2262-04-11", "2024-01-01"], None),
        (["2262-04-01", "2024-01-01"], "2262-04-01"),
        (["1677-09-21", "1677-09-21"], None),
        (["2024-01-01", None], None),
    ],
)
def test_a_payload_has_an_event_time_only_if_sparks_worker_can_represent_it(
    tmp_path: Path, times: list[str | None], latest: str | None
) -> None:
    """Spark's worker converts it to local nanoseconds in any zone; without one the call checks each row."""
    kind = pa.timestamp("us", "UTC")
    rows = pa.record_batch(
        {"c0": pa.array([1, 2]), "c1": pa.array(times).cast(pa.timestamp("us")).cast(kind), "__hash": pa.array([5, 5])}
    )
    timed_job = replace(make_job(tmp_path), event_time_position=1)
    (sent,) = pack(timed_job.to_plain(), iter([rows]))
    event_times = sent.column("event_time")
    assert [None if time is None else str(time.date()) for time in event_times.to_pylist()] == [latest]
    for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):
        pc.local_timestamp(event_times.cast(pa.timestamp("us", zone))).cast(pa.timestamp("ns"))


# -- buckets by source partition -----------------------------------------------------------------------------------

_KEY = '{"type":"struct","fields":[{"name":"k","type":"long","nullable":true,"metadata":{}}]}'
_SOURCE = SourcePartition("p", {"a": [2, 4], "b": 3}, stream="s", group_by=BY_STREAM_AND_PARTITION)


def sum_by_key(keyed: KeyedRows) -> tuple[pa.Table, np.ndarray]:
    rows = keyed.by_key
    sums = np.add.reduceat(rows.column("n").to_numpy(), keyed.starts)
    keys = rows.column("k").take(pa.array(keyed.starts))
    return pa.table({"k": keys, "n": sums}), np.arange(len(keyed.starts))


def make_partitioned_rows(keys: int, rows: int) -> tuple[pa.RecordBatch, list[tuple[int, int, int]]]:
    """Return packed columns of rows from two streams of which the first has grown, and key, count and bucket of each."""
    rng = np.random.default_rng(5)
    key, of_b = rng.integers(0, keys, rows), rng.integers(0, 2, rows).astype(bool)
    grown = np.arange(rows) > rows // 2
    partition = np.where(of_b, key % 3, np.where(grown, key % 4, key % 2))
    bucket = np.where(of_b, 2 + key % 3, key % 2)
    packed = {
        "c0": pa.array(key),
        "c1": pa.array(np.ones(rows, np.int64)),
        # Some keys share a hash.
        "__hash": pa.array(rng.integers(-(2**63), 2**63, keys // 2 + 1)[key // 2]),
        "__partition": pa.array(partition),
        "__stream": pa.array(np.where(of_b, "b", "a").tolist()),
    }
    return pa.record_batch(packed), list(zip(key.tolist(), [1] * rows, bucket.tolist(), strict=True))


@pytest.mark.parametrize("combine", [False, True])
@pytest.mark.parametrize(("keys", "rows"), [(12, 3_000), (100_000, 3_000), (1, 1)])
def test_rows_reach_the_bucket_of_their_source_partition(tmp_path: Path, combine: bool, keys: int, rows: int) -> None:
    """Rows of a key in two streams stay separate even if they are combined, and no helper column is sent with them."""
    options = replace(make_job(tmp_path).options, bucket_by=_SOURCE)
    job = job_of(options, columns=("k", "n"), key_schema=_KEY)
    batch, expected_rows = make_partitioned_rows(keys, rows)
    combiner = Combiner(sum_by_key, ("k", "n"), (0,)) if combine else None
    received: Counter[tuple[int, int]] = Counter()
    rows_received = 0
    for packed in pack(job.to_plain(), iter([batch.slice(0, rows // 3), batch.slice(rows // 3)]), combiner):
        for label, payload in zip(*packed.select(["bucket", "payload"]).to_pydict().values(), strict=True):
            for decoded in decode(payload, lambda *_: b""):
                assert decoded.schema.names == ["c0", "c1", "__hash"]
                hashes = decoded.column("__hash").to_numpy().view(np.uint64)
                assert not combine or keys > rows or (hashes[1:] >= hashes[:-1]).all()
                rows_received += decoded.num_rows
                for key, n in zip(*decoded.select(["c0", "c1"]).to_pydict().values(), strict=True):
                    received[key, label_bucket(label)] += n
    expected: Counter[tuple[int, int]] = Counter()
    for key, n, bucket in expected_rows:
        expected[key, bucket] += n
    assert received == expected
    assert rows_received == (len(expected) if combine and keys < rows else rows)


def test_every_bucket_receives_the_new_partitions_of_a_batch(tmp_path: Path) -> None:
    """The calls decide from the rows of all tasks whether the source may have grown; each attempt sends the same."""
    batch, _ = make_partitioned_rows(12, 3_000)

    def read_notes(source: SourcePartition) -> list[tuple[int, dict[str, int]]]:
        job = job_of(replace(make_job(tmp_path).options, bucket_by=source), columns=("k", "n"), key_schema=_KEY)
        notes = []
        for packed in pack(job.to_plain(), iter([batch.slice(0, 2_000), batch.slice(2_000)])):
            for label, payload in zip(*packed.select(["bucket", "payload"]).to_pydict().values(), strict=True):
                largest = decode_partitions(payload)
                if largest is not None:
                    notes.append((label_bucket(label), largest))
        return notes

    assert read_notes(_SOURCE) == [(bucket, {"a": 3}) for bucket in range(5)] == read_notes(_SOURCE)
    assert read_notes(replace(_SOURCE, reached={"a": 4})) == []
    assert read_notes(replace(_SOURCE, checkpoint_location="/checkpoint")) == []


@pytest.mark.parametrize(
    ("offsets", "query", "error", "text"),
    [
        ('{"a":{"0":1,"1":1,"2":1,"3":0},"b":{"0":1,"1":0,"2":0}}', "query", None, ""),
        ('{"a":{"0":1,"1":1,"2":1},"b":{"0":1,"1":0,"2":0}}', "query", PartitionsChangedError, "'a' has 3 partitions"),
        (
            '{"a":{"0":1,"1":1,"2":1,"3":0},"b":{"0":1,"1":0,"2":0}}',
            "other",
            UsageError,
            "belongs to the query other, but this is",
        ),
        ('{"logOffset":2}', "query", UsageError, "does not name a stream 'a'"),
        (None, "query", UsageError, "has no offsets although a batch is running"),
    ],
)
def test_the_offsets_of_a_batch_are_compared_before_its_rows_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    offsets: str | None,
    query: str,
    error: type[Exception] | None,
    text: str,
) -> None:
    monkeypatch.setattr(packing, "TaskContext", SimpleNamespace(get=lambda: SimpleNamespace(partitionId=lambda: 0)))
    monkeypatch.setattr(packing, "current_task", lambda _: TaskInfo("query", "run", 12))
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "metadata").write_text(json.dumps({"id": query}))
    if offsets is not None:
        # The offsets with the highest number count; Hadoop writes a checksum file next to each.
        for name, log in (("9", '{"a":{"0":1},"b":{"0":1}}'), ("12", offsets)):
            (checkpoint / "offsets" / name).write_text(f"v1\n{{}}\n{log}")
            (checkpoint / "offsets" / f".{name}.crc").write_bytes(b"crc")
    source = replace(_SOURCE, checkpoint_location=str(checkpoint))
    job = job_of(replace(make_job(tmp_path).options, bucket_by=source), columns=("k", "n"), key_schema=_KEY)
    batch, _ = make_partitioned_rows(12, 3_000)
    rows = iter([batch])
    packed = pack(job.to_plain(), rows)
    if error is None:
        assert sum(payloads.num_rows for payloads in packed) > 5
        return
    with pytest.raises(error, match=text):
        list(packed)
    assert list(rows) == [batch]


def test_a_row_of_an_undeclared_partition_is_refused(tmp_path: Path) -> None:
    options = replace(make_job(tmp_path).options, bucket_by=replace(_SOURCE, counts={"a": 2, "b": 3}))
    batch, _ = make_partitioned_rows(12, 3_000)
    with pytest.raises(PartitionsChangedError, match=r"partition [23] of stream 'a'"):
        list(pack(job_of(options, columns=("k", "n"), key_schema=_KEY).to_plain(), iter([batch])))
