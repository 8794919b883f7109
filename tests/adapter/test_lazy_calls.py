"""Calls on empty disks, whose state is in a store elsewhere: the environment says that they restore lazily."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from peer_support import SECRET, SECRET_TEXT
from sqlite_backend import SqliteFiles
from started_query import GOLDEN, Query, rewritten, rows, unchanged
from test_starts_elsewhere import _sqlite

from arrow_schemas import CheckpointRef
from arrow_schemas.lineage import SNAPSHOT, parse_file_name
from arrow_schemas.row import RowSchema
from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica
from spark_state_ext import Savepoint
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_body import read_announced_index
from spark_state_ext.peers.discovery import ADDRESS_KIND
from spark_state_ext.peers.served_snapshots import SnapshotFile
from spark_state_ext.peers.server import PeerServer
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.spark.executor.opened_bucket import OpenBucket
from spark_state_ext.standby.members import Membership
from spark_state_ext.store import View
from spark_state_ext.store.runs import get_hashes
from tests.helpers.waiting import eventually

BYTES_MIN = "SPARK_STATE_EXT_LAZY_RESTORE_BYTES_MIN"


def _all(opened: OpenBucket) -> pa.RecordBatch:
    return pa.Table.from_batches(list(opened.bucket.scan())).combine_chunks().to_batches()[0]


def _snapshots(opened: OpenBucket) -> dict[CheckpointRef, bytes]:
    files = opened.replicas[0].restore.restore()
    assert isinstance(files, SqliteFiles)
    names = {entry.name: parse_file_name(entry.name) for entry in files.entries()}
    return {it[0]: files.get(name) for name, it in names.items() if it is not None and it[1] == SNAPSHOT}


def _looked_up(view: View, known: pa.RecordBatch, schema: RowSchema) -> list[dict[str, object]]:
    found = view.lookup(get_hashes(known), schema.key_columns(known))
    by_row = found.rows.to_pylist()
    return [by_row[at] for at in found.index.tolist()]


@pytest.mark.parametrize("lazily", [True, False])
def test_a_call_restores_what_its_keys_need(
    lazily: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(BYTES_MIN, "1" if lazily else "1000000000")
    savepoint = tmp_path / "savepoint"
    shutil.copytree(GOLDEN / "savepoint-1" / "canonical", savepoint)
    operator = read_manifest(Folder(str(savepoint))).header.operators["golden"]
    query = Query(tmp_path / "query", operator, Savepoint(str(savepoint)), backends=[_sqlite(tmp_path)])
    known = query.call(1, None, _all)
    assert "restored lazily" not in caplog.text, "what it starts from is fetched whole"
    pointer = query.call(1, None, unchanged)
    shutil.rmtree(savepoint)
    assert "restored lazily" not in caplog.text

    def look(opened: OpenBucket) -> list[dict[str, object]]:
        return opened.bucket.read(lambda view: _looked_up(view, known, opened.schema))

    assert query.call(1, pointer, look) == known.to_pylist()
    assert ("restored lazily" in caplog.text) == lazily
    # Rows over it, and a look at all of them.
    later = query.call(1, pointer, rewritten)
    found = query.call(1, later, rows)
    assert json.loads(found) == json.loads(json.dumps(known.to_pylist(), default=str))


def _asks_peers(opened: OpenBucket) -> bool:
    options = opened.bucket._lazy._options
    return options is not None and options.peers is not None


def test_a_call_with_the_secret_asks_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BYTES_MIN, "1")
    monkeypatch.setenv("SPARK_STATE_EXT_PEER_SECRET", SECRET_TEXT)
    canonical = GOLDEN / "savepoint-1" / "canonical"
    operator = read_manifest(Folder(str(canonical))).header.operators["golden"]
    query = Query(tmp_path / "query", operator, Savepoint(str(canonical)), backends=[_sqlite(tmp_path)])
    known = query.call(1, None, _all)
    pointer = query.call(1, None, unchanged)
    ((begins, snapshot),) = query.call(1, pointer, _snapshots).items()
    path = tmp_path / "snapshot"
    path.write_bytes(snapshot)
    _, index = read_announced_index(lambda start, end: snapshot[start:end], len(snapshot), str(path))
    assert index is not None
    body_bytes = index.body_bytes
    key = BucketKey(operator.operator, pointer.query_folder, 1)
    asked: list[tuple[BucketKey, CheckpointRef]] = []

    class Shelf:
        def find(self, key: BucketKey, ref: CheckpointRef, body_digest: str) -> SnapshotFile | None:
            asked.append((key, ref))
            return SnapshotFile(path, body_bytes)

    server = PeerServer("127.0.0.1", 0, SECRET, Shelf())
    try:
        record = MemberRecord(
            "b", replicas=(StandbyReplica(key, 1),), addresses={ADDRESS_KIND: f"grpc://127.0.0.1:{server.port}"}
        )
        Membership(Folder(str(query.root)), "b", 10.0).heartbeat(record)

        def look(opened: OpenBucket) -> list[dict[str, object]]:
            return opened.bucket.read(lambda view: _looked_up(view, known, opened.schema))

        assert query.call(1, pointer, look) == known.to_pylist()
        assert set(asked) == {(key, begins)}
        # What runs beside the call may be asking for the rest.
        eventually(lambda: server.work.questions["given"] == len(asked))
        assert query.call(1, pointer, _asks_peers)
        monkeypatch.delenv("SPARK_STATE_EXT_PEER_SECRET")
        assert query.call(1, pointer, look) == known.to_pylist()
        assert not query.call(1, pointer, _asks_peers)
        monkeypatch.setenv("SPARK_STATE_EXT_PEER_SECRET", "too short")
        with pytest.raises(UsageError, match="take at least 16"):
            query.call(1, pointer, look)
    finally:
        server.close()


def test_what_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BYTES_MIN, "plenty")
    operator = read_manifest(Folder(str(GOLDEN / "savepoint-1" / "native"))).header.operators["golden"]
    query = Query(tmp_path / "query", operator, Savepoint(str(GOLDEN / "savepoint-1" / "native")))
    with pytest.raises(UsageError, match=f"{BYTES_MIN} is 'plenty'"):
        query.call(1, None, rows)
