"""Tasks that take a savepoint: place the hold, copy the buckets, write the manifest.

They run in `mapInArrow`, because a client of Spark Connect may not be able to reach the folders.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from arrow_schemas.lineage import Writer
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import SavedBucket, SavepointHeader, SavepointManifest
from spark_state_ext.backends.replication import Restorable, close_all
from spark_state_ext.beginning.rescaling import refuse_rescaling
from spark_state_ext.beginning.starts import refuse_unfit_start
from spark_state_ext.engine.job import Job, refuse_other_release
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.process_state import Shared
from spark_state_ext.errors import ChangedJobError, LiveRunError, MissingCheckpointError, StateError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import STARTING_FOLDER
from spark_state_ext.files.operator_catalog import newest_operator
from spark_state_ext.ownership.holds import HOLD_MS, Hold
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import LEASE_FORMAT, NumberedRecord
from spark_state_ext.ownership.query_end import wait_until_free
from spark_state_ext.rescale.origin import list_origin
from spark_state_ext.savepoints.bucket_copy import ReadOptions, save_bucket
from spark_state_ext.savepoints.captured_pointers import Captured
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.saved_rows import choose_operator
from spark_state_ext.savepoints.task_rows import make_answer, make_saved_row, parse_copies
from spark_state_ext.savepoints.writer import finish_savepoint, refuse_existing
from spark_state_ext.version import __version__
from spark_state_ext.worker.local_folders import scratch_folder
from spark_state_ext.worker.worker import Worker

__all__ = ["begin", "capture", "check_start", "describe", "end", "finish", "refuse", "save"]

_LOGGER = logging.getLogger("spark_state_ext")


def _open_query_folder(plain: dict[str, Any]) -> tuple[StateOptions, Folder]:
    refuse_other_release(plain)
    options = StateOptions.from_plain(plain["options"])
    root = Folder(options.root, options.storage_options)
    return options, root.child(plain["operator"], plain["query_folder"])


def begin(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Check that the savepoint's folder is empty, and place a hold on the query folder.

    Yields the id of the hold, and the number of the lease's newest record. Places no hold if the query is to be
    rescaled and has no state here (the answer is the folder), has the requested buckets already, or cannot be rescaled
    (the answer is the error's name and text).
    """
    for _ in batches:
        pass
    options, files = _open_query_folder(plain)
    if plain.get("rescales"):
        operator = newest_operator(files)
        if operator is None:
            yield make_answer({"nothing_in": files.root})
            return
        if operator.bucket_map == options.bucket_map:
            yield make_answer({"stays": True})
            return
        try:
            refuse_rescaling(files, operator, OperatorFile.decode(plain["wanted"].encode(), files.root), plain["case"])
        except ChangedJobError as error:
            yield make_answer({"refused": [type(error).__name__, str(error)]})
            return
    if plain.get("savepoint"):
        refuse_existing(_open_savepoint(plain))
    newest = LeaseLog(files).newest(first=True)
    if newest is not None and newest.record.format < LEASE_FORMAT and not newest.record.released:
        raise UsageError(
            f"the query with its state at {files.root} runs, or ran last, with a release that does not know holds, and "
            "might delete files while they are copied. Run it once with this release, then try again."
        )
    free = None
    if plain.get("claims"):
        # State that is read after this is the query's last, unless a later lease record follows this one.
        free = wait_until_free(LeaseLog(files), plain["claim"], partial(_make_live_error, files))
    held = Hold.place(files, plain["holder"], plain.get("lasts_ms", HOLD_MS))
    yield make_answer({"hold": held.id, "lease": 0 if free is None else free.number})


def _make_live_error(files: Folder, newest: NumberedRecord) -> LiveRunError:
    return LiveRunError(
        f"the state at {files.root} cannot be claimed: {newest.record.owner} writes it, and renews its lease. Stop "
        f"the old query first. If it was killed, wait for {newest.record.lease_ms / 1000:.0f} s, and plan the new "
        "one again"
    )


def end(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Release a hold."""
    for _ in batches:
        pass
    _, files = _open_query_folder(plain)
    Hold(files, plain["hold"]).release()
    yield make_answer(None)


def save(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Copy the buckets of the input's pointers; yield a row for each bucket."""
    shared = Shared.of(Worker.current())
    options, files = _open_query_folder(plain)
    scratch = scratch_folder(options.local_dir)
    operator = _read_current_operator(files)
    # Without a host name: attempts on two hosts write the same file.
    writer = Writer(plain["query_id"], "", plain["batch"], "")
    savepoint = _open_savepoint(plain)
    # Also renew the holds of the query's other operators, which wait to be copied.
    with _renew_holds([Hold(_open_query_folder(part)[1], part["hold"]) for part in plain["parts"]]):
        for batch in batches:
            for value in batch.column(0).to_pylist():
                pointer = Pointer.decode(bytes(value))
                timeout_s = options.commit.commit_timeout_ms / 1000
                replicas: list[Restorable] = [
                    *shared.replicas.reading(options.backends, pointer, scratch, timeout_s),
                    *list_origin(options.backends, pointer, operator.bucket_map, operator.row_schema(), scratch),
                ]
                try:
                    copy = save_bucket(
                        pointer,
                        replicas,
                        savepoint.child(pointer.operator, str(pointer.bucket)),
                        plain["form"],
                        operator.row_schema(),
                        scratch,
                        reading=ReadOptions(options.restore_from, plain["verify"]),
                        writer=writer,
                    )
                finally:
                    close_all(replicas)
                yield make_saved_row(copy)


@contextmanager
def _renew_holds(holds: Sequence[Hold]) -> Iterator[None]:
    """Renew holds in the background of a long operation."""
    over = threading.Event()
    # Before anything is copied: a hold may have expired while the task waited to run.
    records = [hold.renew() for hold in holds]

    def renew() -> None:
        while not over.wait(min(record.lasts_ms for record in records) / 3000):
            for hold, record in zip(holds, records, strict=True):
                try:
                    hold.renew()
                except StateError as error:
                    _LOGGER.warning("the hold of %s could not be renewed: %s", record.holder, error)

    thread = threading.Thread(target=renew, name="spark_state_ext hold", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _read_current_operator(files: Folder) -> OperatorFile:
    operator = newest_operator(files)
    if operator is None:
        raise MissingCheckpointError(
            f"there is no operator file in {files.root}: check root and operator of the given ArrowState"
        )
    return operator


def finish(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the manifest from the input's rows; yield the id of the savepoint."""
    rows = [(row["saved"], row["pointer"]) for batch in batches for row in batch.to_pylist()]
    buckets = [copy.saved for copy in parse_copies(rows)]
    operators: dict[str, OperatorFile] = {}
    for part in plain["parts"]:
        _, query_folder = _open_query_folder(part)
        operators[part["operator"]] = _read_current_operator(query_folder)
    if "operator_file" in plain:
        operator = OperatorFile.decode(plain["operator_file"].encode(), "the operator of the savepoint")
        operators[operator.operator] = operator
        # A table's buckets without rows have no state. (A query's buckets all have a pointer, or there is an error.)
        with_rows = {saved.bucket for saved in buckets}
        empty = Pointer(operator.operator, 0, operator.buckets, operator.schema_id, -1, plain["watermark_ms"])
        buckets += [
            SavedBucket(operator.operator, bucket, replace(empty, bucket=bucket), ())
            for bucket in range(operator.buckets)
            if bucket not in with_rows
        ]
    watermarks = [saved.pointer.watermark_ms for saved in buckets if saved.pointer.watermark_ms is not None]
    header = SavepointHeader(
        id=plain["id"],
        form=plain["form"],
        made_ms=plain["made_ms"],
        operators=operators,
        package_version=__version__,
        query_id=plain["query_id"],
        batch=plain["batch"],
        watermark_ms=max(watermarks, default=None),
        offsets=plain["offsets"],
    )
    manifest = SavepointManifest(header, tuple(sorted(buckets, key=lambda saved: (saved.operator, saved.bucket))))
    finish_savepoint(_open_savepoint(plain), manifest)
    yield make_answer({"id": header.id, "watermark_ms": header.watermark_ms})


def refuse(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Check that a savepoint's folder is empty."""
    for _ in batches:
        pass
    refuse_existing(_open_savepoint(plain))
    yield make_answer(None)


def describe(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield an operator of a savepoint, and its schemas."""
    for _ in batches:
        pass
    manifest = read_manifest(_open_savepoint(plain))
    name = choose_operator(manifest, plain["operator"], plain["savepoint"])
    operator = manifest.header.operators[name]
    shown = operator.row_schema().without_expiry()
    state = json.loads(operator.state_schema)
    state["fields"] = [field for field in state["fields"] if field["name"] in {column.name for column in shown.state}]
    yield make_answer(
        {
            "operator": name,
            "buckets": operator.buckets,
            "one_state": operator.bucket_map.one_state,
            "key_schema": json.loads(operator.key_schema),
            "state_schema": state,
            "names": operator.row_schema().shown_names(),
        }
    )


def capture(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the input's pointers to a file, for the first batch of a query that starts from them."""
    pointers = [Pointer.decode(bytes(value)) for batch in batches for value in batch.column(0).to_pylist()]
    captured = Captured(
        plain["operator"],
        plain["batch"],
        tuple(plain["later"]),
        plain["hold"],
        plain["lease"],
        {pointer.bucket: pointer for pointer in sorted(pointers, key=lambda pointer: pointer.bucket)},
    )
    target = plain["target"]
    notes = Folder(target["root"], target["storage_options"]).child(target["operator"], STARTING_FOLDER)
    notes.put(plain["file"], captured.encode())
    yield make_answer({"buckets": len(pointers)})


def check_start(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the error that keeps a job from starting from its snapshot, as far as it is known yet; None without one."""
    for _ in batches:
        pass
    try:
        refuse_unfit_start(Job.from_plain(plain["job"]))
    except StateError as error:
        yield make_answer({"error": type(error).__name__, "text": str(error)})
        return
    yield make_answer(None)


def _open_savepoint(plain: dict[str, Any]) -> Folder:
    return Folder(plain["savepoint"], plain["savepoint_options"])
