"""Calls on empty disks whose backend is not a file system: an environment variable makes them restore lazily."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from peer_support import SECRET, SECRET_TEXT
from sqlite_backend import SqliteFiles
from started_query import GOLDEN, Query, commit_unchanged, read_rows, rewrite_rows
from test_starts_elsewhere import make_sqlite_backend

from arrow_schemas import CheckpointRef
from arrow_schemas.lineage import SNAPSHOT, parse_file_name
from arrow_schemas.row import RowSchema
from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica
from spark_state_ext import Savepoint
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_body import read_announced_index
from spark_state_ext.peers.discovery import ADDRESS_KIND
from spark_state_ext.peers.piece_requests import Peers
from spark_state_ext.peers.served_snapshots import SnapshotFile
from spark_state_ext.peers.server import PeerServer
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.spark.executor.opened_bucket import OpenBucket
from spark_state_ext.standby.members import Membership
from spark_state_ext.store import View
from spark_state_ext.store.runs import get_hashes
from tests.helpers.waiting import WAIT_S, eventually

BYTES_MIN = "SPARK_STATE_EXT_LAZY_RESTORE_BYTES_MIN"


def scan_all(opened: OpenBucket) -> pa.RecordBatch:
    return pa.Table.from_batches(list(opened.bucket.scan())).combine_chunks().to_batches()[0]


def read_snapshots(opened: OpenBucket) -> dict[CheckpointRef, bytes]:
    files = opened.replicas[0].restore.restore()
    assert isinstance(files, SqliteFiles)
    names = {entry.name: parse_file_name(entry.name) for entry in files.entries()}
    return {
        parsed[0]: files.get(name) for name, parsed in names.items() if parsed is not None and parsed[1] == SNAPSHOT
    }


def look_up(view: View, known: pa.RecordBatch, schema: RowSchema) -> list[dict[str, object]]:
    lookup = view.lookup(get_hashes(known), schema.key_columns(known))
    by_row = lookup.rows.to_pylist()
    return [by_row[at] for at in lookup.index.tolist()]


@pytest.mark.parametrize("lazy", [True, False])
def test_a_call_restores_lazily_above_the_configured_size(
    lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(BYTES_MIN, "1" if lazy else "1000000000")
    savepoint = tmp_path / "savepoint"
    shutil.copytree(GOLDEN / "savepoint-1" / "canonical", savepoint)
    operator = read_manifest(Folder(str(savepoint))).header.operators["golden"]
    query = Query(tmp_path / "query", operator, Savepoint(str(savepoint)), backends=[make_sqlite_backend(tmp_path)])
    known = query.call(1, None, scan_all)
    assert "restored lazily" not in caplog.text, "the savepoint is fetched whole"
    pointer = query.call(1, None, commit_unchanged)
    shutil.rmtree(savepoint)
    assert "restored lazily" not in caplog.text

    def look(opened: OpenBucket) -> list[dict[str, object]]:
        return opened.bucket.read(lambda view: look_up(view, known, opened.schema))

    assert query.call(1, pointer, look) == known.to_pylist()
    assert ("restored lazily" in caplog.text) == lazy
    # Write all rows again above the lazy run, and read them.
    later = query.call(1, pointer, rewrite_rows)
    rows = query.call(1, later, read_rows)
    assert json.loads(rows) == json.loads(json.dumps(known.to_pylist(), default=str))


def asks_peers(opened: OpenBucket) -> bool:
    options = opened.bucket._lazy._options
    return options is not None and options.peers is not None


def test_a_call_asks_peers_if_it_has_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BYTES_MIN, "1")
    monkeypatch.setenv("SPARK_STATE_EXT_PEER_SECRET", SECRET_TEXT)
    # A call waits about a second for a peer, and then asks the store. A slow machine takes longer to answer.
    monkeypatch.setattr(Peers, "_timeout_s", lambda self, size_bytes: WAIT_S)
    canonical = GOLDEN / "savepoint-1" / "canonical"
    operator = read_manifest(Folder(str(canonical))).header.operators["golden"]
    query = Query(tmp_path / "query", operator, Savepoint(str(canonical)), backends=[make_sqlite_backend(tmp_path)])
    known = query.call(1, None, scan_all)
    pointer = query.call(1, None, commit_unchanged)
    ((base_ref, snapshot),) = query.call(1, pointer, read_snapshots).items()
    path = tmp_path / "snapshot"
    path.write_bytes(snapshot)
    _, index = read_announced_index(lambda start, end: snapshot[start:end], len(snapshot), str(path))
    assert index is not None
    body_bytes = index.body_bytes
    key = BucketKey(operator.operator, pointer.query_folder, 1)
    requests: list[tuple[BucketKey, CheckpointRef]] = []

    class Shelf:
        def find(self, key: BucketKey, ref: CheckpointRef, body_digest: str) -> SnapshotFile | None:
            requests.append((key, ref))
            return SnapshotFile(path, body_bytes)

    server = PeerServer("127.0.0.1", 0, SECRET, Shelf())
    try:
        record = MemberRecord(
            "b", replicas=(StandbyReplica(key, 1),), addresses={ADDRESS_KIND: f"grpc://127.0.0.1:{server.port}"}
        )
        Membership(Folder(str(query.root)), "b", 10.0).heartbeat(record)

        def look(opened: OpenBucket) -> list[dict[str, object]]:
            return opened.bucket.read(lambda view: look_up(view, known, opened.schema))

        assert query.call(1, pointer, look) == known.to_pylist()
        assert set(requests) == {(key, base_ref)}
        # A background task may still be asking for the other pieces.
        eventually(lambda: server.work.questions["given"] == len(requests))
        assert query.call(1, pointer, asks_peers)
        monkeypatch.delenv("SPARK_STATE_EXT_PEER_SECRET")
        assert query.call(1, pointer, look) == known.to_pylist()
        assert not query.call(1, pointer, asks_peers)
        monkeypatch.setenv("SPARK_STATE_EXT_PEER_SECRET", "too short")
        with pytest.raises(UsageError, match="take at least 16"):
            query.call(1, pointer, look)
    finally:
        server.close()


def test_a_size_that_is_not_a_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BYTES_MIN, "plenty")
    operator = read_manifest(Folder(str(GOLDEN / "savepoint-1" / "native"))).header.operators["golden"]
    query = Query(tmp_path / "query", operator, Savepoint(str(GOLDEN / "savepoint-1" / "native")))
    with pytest.raises(UsageError, match=f"{BYTES_MIN} is 'plenty'"):
        query.call(1, None, read_rows)
