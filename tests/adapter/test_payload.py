"""Payloads, and which bucket a row goes to."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from arrow_schemas.labels import find_buckets
from spark_state_ext.engine.spill_folders import spill_folder, spill_is_stale
from spark_state_ext.errors import CorruptFileError
from spark_state_ext.spark.shuffle.pack import inline_share
from spark_state_ext.spark.shuffle.payload import (
    NO_ROW_LIMIT,
    decode,
    encode,
    encode_spill_reference,
    heartbeat,
    heartbeat_nonce,
    payload_bytes_max,
)


def no_file(name: str, offset: int, length: int) -> bytes:
    raise AssertionError(f"nothing should be read from {name}")


def test_rows_come_back_exactly() -> None:
    batch = pa.record_batch({"a": pa.array([2**53 + 1, None]), "b": pa.array([[{"x": 1}], None])})
    assert list(decode(encode(batch), no_file)) == [batch]


def test_a_slice_carries_only_its_own_rows() -> None:
    batch = pa.record_batch({"a": pa.array(np.random.default_rng(0).integers(0, 2**62, 100_000))})
    assert len(encode(batch.slice(50_000, 10))) < 2_000


def test_the_heartbeat_has_no_rows() -> None:
    beat = heartbeat("application plan 1")
    assert list(decode(beat, no_file)) == []
    nonce = heartbeat_nonce(beat)
    assert nonce is not None
    assert len(nonce) == 16
    assert heartbeat("application plan 1") == beat, "Spark compares what attempts at a task send"
    assert heartbeat_nonce(heartbeat("application plan 2")) not in (None, nonce), "each stage has its own"
    assert heartbeat_nonce(encode(pa.record_batch({"a": pa.array([1])}))) is None
    with pytest.raises(CorruptFileError):
        list(decode(b"", no_file))


def test_a_spilled_payload_is_read_from_its_place() -> None:
    batch = pa.record_batch({"a": pa.array([1, 2, 3])})
    stored = b"before" + encode(batch) + b"after"
    reference = encode_spill_reference("spill/7/x.payloads", 6, len(encode(batch)))
    assert list(decode(reference, lambda name, offset, length: stored[offset : offset + length])) == [batch]


def test_a_short_spill_file_is_refused() -> None:
    with pytest.raises(CorruptFileError, match=r"x\.payloads"):
        list(decode(encode_spill_reference("x.payloads", 0, 10), lambda name, offset, length: b"A"))


def test_an_unknown_payload_is_refused() -> None:
    with pytest.raises(CorruptFileError, match="same release"):
        list(decode(b"Zxxx", no_file))


@pytest.mark.parametrize("records", [1, 100, 10_000, 1_000_000, 2**31 - 2])
def test_a_full_arrow_batch_of_payloads_stays_below_two_gibibytes(records: int) -> None:
    target = payload_bytes_max(records)
    assert target <= 1 << 20
    assert target == 4 << 10 or target * records <= 1 << 30


def test_payloads_are_not_cut_small_where_there_is_no_limit_of_rows() -> None:
    """`maxRecordsPerBatch` of 0: Spark sends whatever there is at once."""
    assert payload_bytes_max(NO_ROW_LIMIT) == 1 << 20


@pytest.mark.parametrize("buckets", [1, 3, 16, 64, 32_768])
def test_buckets_are_ranges_of_hashes_of_equal_size(buckets: int) -> None:
    hashes = np.random.default_rng(1).integers(0, 2**64, 200_000, dtype=np.uint64)
    found = find_buckets(np.sort(hashes), buckets)
    assert found.min() >= 0
    assert found.max() < buckets
    assert (np.diff(found) >= 0).all()
    if buckets <= 64:
        counts = np.bincount(found, minlength=buckets)
        assert counts.min() > 0.9 * len(hashes) / buckets


def test_the_shares_of_any_number_of_tasks_stay_below_what_one_bucket_may_get() -> None:
    shares = [inline_share(partition) for partition in range(100_000)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) < 192 << 20
    # Ordinary batches of ordinary jobs need no spill files.
    assert shares[7] > 1 << 20
    assert shares[199] > 16 << 10


def test_only_folders_of_batches_that_are_over_are_stale() -> None:
    """Rule 6: a spill file is removed by a later batch's call, or after a day where batches are not known."""
    for name, stale in {
        "3-99": True,
        "3-100": False,
        "3-101": False,
        "4-99": False,
        "5-99": False,
        # Of an earlier release.
        "3": True,
        "4": False,
        "": False,
        "t": False,
        "-3": False,
        "3-": False,
        "somebody's notes": False,
    }.items():
        assert spill_is_stale(name, 4, 100.0, 1_000.0) == stale, name
        assert not spill_is_stale(name, None, 100.0, 1_000.0), name
    written_s = 1_000_000.0
    folder = spill_folder("", None, written_s).removeprefix("spill/")
    for batch in (None, 7):
        assert not spill_is_stale(folder, batch, written_s * 2, written_s + 86_000)
        assert spill_is_stale(folder, batch, 0.0, written_s + 86_500)
