"""Payloads, the bucket of a row, and spill folders."""

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


def read_no_file(name: str, offset: int, length: int) -> bytes:
    raise AssertionError(f"no file should be read, but was: {name}")


def test_decoded_rows_equal_the_encoded_rows() -> None:
    batch = pa.record_batch({"a": pa.array([2**53 + 1, None]), "b": pa.array([[{"x": 1}], None])})
    assert list(decode(encode(batch), read_no_file)) == [batch]


def test_the_payload_of_a_slice_has_only_its_own_rows() -> None:
    batch = pa.record_batch({"a": pa.array(np.random.default_rng(0).integers(0, 2**62, 100_000))})
    assert len(encode(batch.slice(50_000, 10))) < 2_000


def test_a_heartbeat_has_no_rows_and_one_nonce_per_stage() -> None:
    beat = heartbeat("application plan 1")
    assert list(decode(beat, read_no_file)) == []
    nonce = heartbeat_nonce(beat)
    assert nonce is not None
    assert len(nonce) == 16
    assert heartbeat("application plan 1") == beat, "attempts at a task must send the same"
    assert heartbeat_nonce(heartbeat("application plan 2")) not in (None, nonce), "each stage has its own nonce"
    assert heartbeat_nonce(encode(pa.record_batch({"a": pa.array([1])}))) is None
    with pytest.raises(CorruptFileError):
        list(decode(b"", read_no_file))


def test_a_spilled_payload_is_read_from_its_range_of_the_file() -> None:
    batch = pa.record_batch({"a": pa.array([1, 2, 3])})
    stored = b"before" + encode(batch) + b"after"
    reference = encode_spill_reference("spill/7/x.payloads", 6, len(encode(batch)))
    assert list(decode(reference, lambda name, offset, length: stored[offset : offset + length])) == [batch]


def test_a_short_spill_file_is_refused() -> None:
    with pytest.raises(CorruptFileError, match=r"x\.payloads"):
        list(decode(encode_spill_reference("x.payloads", 0, 10), lambda name, offset, length: b"A"))


def test_an_unknown_payload_is_refused() -> None:
    with pytest.raises(CorruptFileError, match="same release"):
        list(decode(b"Zxxx", read_no_file))


@pytest.mark.parametrize("records", [1, 100, 10_000, 1_000_000, 2**31 - 2])
def test_a_full_arrow_batch_of_payloads_stays_below_two_gibibytes(records: int) -> None:
    target = payload_bytes_max(records)
    assert target <= 1 << 20
    assert target == 4 << 10 or target * records <= 1 << 30


def test_payloads_have_the_maximum_size_if_rows_are_not_limited() -> None:
    """With a `maxRecordsPerBatch` of 0 Spark sends all rows at once."""
    assert payload_bytes_max(NO_ROW_LIMIT) == 1 << 20


@pytest.mark.parametrize("buckets", [1, 3, 16, 64, 32_768])
def test_buckets_are_equal_ranges_of_hashes(buckets: int) -> None:
    hashes = np.random.default_rng(1).integers(0, 2**64, 200_000, dtype=np.uint64)
    bucket_of = find_buckets(np.sort(hashes), buckets)
    assert bucket_of.min() >= 0
    assert bucket_of.max() < buckets
    assert (np.diff(bucket_of) >= 0).all()
    if buckets <= 64:
        counts = np.bincount(bucket_of, minlength=buckets)
        assert counts.min() > 0.9 * len(hashes) / buckets


def test_the_inline_shares_of_any_number_of_tasks_are_limited_in_sum() -> None:
    shares = [inline_share(partition) for partition in range(100_000)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) < 192 << 20
    # Typical batches need no spill files.
    assert shares[7] > 1 << 20
    assert shares[199] > 16 << 10


def test_only_spill_folders_of_finished_batches_are_stale() -> None:
    """Rule 6: a call of a later batch removes a spill file; if batches are unknown, a call removes it after a day."""
    for name, stale in {
        "3-99": True,
        "3-100": False,
        "3-101": False,
        "4-99": False,
        "5-99": False,
        # Earlier releases used these names.
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
