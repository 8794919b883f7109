"""A batch of one bucket, as the packing stage sent it: its rows, sorted by hash, and what else it tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.state import GroupStateTimeout

from spark_state_ext.errors import CorruptFileError
from spark_state_ext.files.folder import Folder
from spark_state_ext.spark.executor.going_on import Outlook
from spark_state_ext.spark.executor.opening import CallFolders
from spark_state_ext.spark.executor.packing_notes import PackingNotes
from spark_state_ext.spark.shuffle.pack import event_times
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN, decode
from spark_state_ext.worker.spill import HashSorter

__all__ = ["Decoded", "decode_batch"]


@dataclass(frozen=True)
class Decoded:
    """What a batch brought a bucket.

    Parameters
    ----------
    sorter
        Its rows that are not late.
    rows
        How many there are.
    notes
        What packing told besides.
    nonce
        The number that all first calls of a query have in common.
    """

    sorter: HashSorter
    rows: int
    notes: PackingNotes
    nonce: bytes


def decode_batch(outlook: Outlook, frames: Iterable[pd.DataFrame], folders: CallFolders) -> Decoded:
    """Read all payloads of a call."""
    info, notes, rows = outlook.info, PackingNotes(), 0
    sorter = HashSorter(folders.scratch, HASH_COLUMN, info.job.options.memory_bytes_max)
    for batch in _payload_rows(outlook, frames, notes, folders.operator):
        rows += batch.num_rows
        sorter.add(batch)
    # An imported bucket's first batch may have no rows, and so no heartbeat.
    imported = info.imported.nonce if info.imported is not None else b""
    return Decoded(sorter, rows, notes, notes.heartbeat or imported)


def _payload_rows(
    outlook: Outlook, frames: Iterable[pd.DataFrame], notes: PackingNotes, root: Folder
) -> Iterator[pa.RecordBatch]:
    late_until_us = _late_threshold_us(outlook)

    def load_spilled(name: str, offset: int, length: int) -> bytes:
        return root.get_range(name, offset, offset + length)

    for frame in frames:
        if "payload" not in frame.columns:
            continue
        for payload in frame["payload"]:
            if not isinstance(payload, (bytes, bytearray)):
                raise CorruptFileError(f"a payload of bucket {outlook.info.bucket} is {type(payload).__name__}")
            payload = bytes(payload)
            if notes.take(payload):
                continue
            for batch in decode(payload, load_spilled):
                yield batch if late_until_us is None else _on_time(outlook, batch, late_until_us)


def _late_threshold_us(outlook: Outlook) -> int | None:
    """Rows at or before this event time are late; Spark filters only under the event-time timeout."""
    job, before = outlook.info.job, outlook.before
    if job.timeout_conf != GroupStateTimeout.EventTimeTimeout or job.event_time_position < 0:
        return None
    if not job.late_by_previous_watermark:
        return outlook.info.times.watermark_ms * 1000
    return ((before.watermark_ms if before is not None else None) or 0) * 1000


def _on_time(outlook: Outlook, batch: pa.RecordBatch, late_until_us: int) -> pa.RecordBatch:
    times = event_times(outlook.info.job, pa.Table.from_batches([batch]))
    assert times is not None, "checked in _late_threshold_us"
    # A NULL event time is never late.
    late = times.combine_chunks().fill_null(2**63 - 1).to_numpy(zero_copy_only=False) <= late_until_us
    return batch.filter(pa.array(~late)) if late.any() else batch
