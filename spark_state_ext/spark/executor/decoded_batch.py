"""Decode the payloads of a call: rows, sorted by hash, and the packing stage's notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.state import GroupStateTimeout

from spark_state_ext.errors import CorruptFileError
from spark_state_ext.files.folder import Folder
from spark_state_ext.spark.executor.decision import Outlook
from spark_state_ext.spark.executor.opened_bucket import CallFolders
from spark_state_ext.spark.executor.packing_notes import PackingNotes
from spark_state_ext.spark.shuffle.pack import read_event_times
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN, decode
from spark_state_ext.worker.spill import HashSorter

__all__ = ["Decoded", "decode_batch"]


@dataclass(frozen=True)
class Decoded:
    """The content of a batch for one bucket.

    Parameters
    ----------
    sorter
        The rows that are not late.
    rows
        The number of these rows.
    notes
        The packing stage's notes.
    nonce
        A number that is the same in all first calls of a query.
    """

    sorter: HashSorter
    rows: int
    notes: PackingNotes
    nonce: bytes


def decode_batch(outlook: Outlook, frames: Iterable[pd.DataFrame], folders: CallFolders) -> Decoded:
    """Decode all payloads of a call."""
    info, notes, rows = outlook.info, PackingNotes(), 0
    sorter = HashSorter(folders.scratch, HASH_COLUMN, info.job.options.memory_bytes_max)
    for batch in _decode_payloads(outlook, frames, notes, folders.operator):
        rows += batch.num_rows
        sorter.add(batch)
    # An imported bucket's first batch may have no rows, and then has no heartbeat.
    imported = info.imported.nonce if info.imported is not None else b""
    return Decoded(sorter, rows, notes, notes.heartbeat or imported)


def _decode_payloads(
    outlook: Outlook, frames: Iterable[pd.DataFrame], notes: PackingNotes, root: Folder
) -> Iterator[pa.RecordBatch]:
    late_until_us = _get_late_threshold_us(outlook)

    def load_spilled(name: str, offset: int, length: int) -> bytes:
        return root.get_range(name, offset, offset + length)

    for frame in frames:
        if "payload" not in frame.columns:
            continue
        for payload in frame["payload"]:
            if not isinstance(payload, (bytes, bytearray)):
                raise CorruptFileError(
                    f"a payload of bucket {outlook.info.bucket} has the type {type(payload).__name__}, not bytes"
                )
            payload = bytes(payload)
            if notes.take(payload):
                continue
            for batch in decode(payload, load_spilled):
                yield batch if late_until_us is None else _drop_late_rows(outlook, batch, late_until_us)


def _get_late_threshold_us(outlook: Outlook) -> int | None:
    """Return the event time at or before which rows are late; None if no rows are dropped.

    As in Spark, only the event-time timeout drops late rows.
    """
    job, before = outlook.info.job, outlook.before
    if job.timeout_conf != GroupStateTimeout.EventTimeTimeout or job.event_time_position < 0:
        return None
    if not job.late_by_previous_watermark:
        return outlook.info.times.watermark_ms * 1000
    return ((before.watermark_ms if before is not None else None) or 0) * 1000


def _drop_late_rows(outlook: Outlook, batch: pa.RecordBatch, late_until_us: int) -> pa.RecordBatch:
    times = read_event_times(outlook.info.job, pa.Table.from_batches([batch]))
    assert times is not None, "checked in _get_late_threshold_us"
    # A NULL event time is never late.
    late = times.combine_chunks().fill_null(2**63 - 1).to_numpy(zero_copy_only=False) <= late_until_us
    return batch.filter(pa.array(~late)) if late.any() else batch
