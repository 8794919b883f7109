"""Peers give the same pieces as the backend, and a task has the right rows whatever a peer does."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lazy_bucket import FIRST, LAST, SCHEMA, SNAPSHOT_NAME, lazy_files
from peer_support import KEY, SECRET, SECRET_TEXT, PeerWorld, certified, service_of
from pyarrow import flight

from arrow_schemas.blocks import BLOCK_BYTES, PIECE_BYTES, digest_crcs
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.peers import BUSY, GIVEN, PIECES_ACTION, PeerAnswer, PeerQuestion, PeerSecret
from arrow_schemas.standby import BucketKey, StandbySettings
from spark_state_ext.errors import InterruptedRestoreError, PeerError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.peers.client import PeerClient
from spark_state_ext.peers.discovery import peers_below
from spark_state_ext.peers.served_snapshots import Shelf, SnapshotFile
from spark_state_ext.peers.server import PeerServer
from spark_state_ext.standby.members import write_settings
from spark_state_ext.standby.metrics import StandbyCollector
from spark_state_ext.standby.roots import ReplicaShelf
from spark_state_ext.standby.service import StandbyService
from spark_state_ext.standby.web import Web
from spark_state_ext.store import LocalStore
from tests.helpers.waiting import WAIT_S, eventually

KEYS, OTHERS, MORE = [5, 777, 11_111, 12_000], [9, 2_345, 9_876], [3_210, 6_543, 7_890]
# Number of requests for the two ends of a snapshot in the backend.
ENDS = 4


@pytest.fixture
def world(tmp_path: Path) -> Iterator[PeerWorld]:
    peer_world = PeerWorld(tmp_path)
    yield peer_world
    peer_world.close()


def test_a_peer_gives_what_a_lookup_needs(world: PeerWorld) -> None:
    server = world.serves()
    world.remote.folder._latency_s = 0.05
    bucket = world.task()
    assert world.look_up(bucket, KEYS) <= ENDS
    assert 0 < world.given_bytes() < len(world.remote.snapshot) / 2
    assert world.look_up(bucket, OTHERS) == 0
    assert server.work.given_bytes == world.given_bytes()
    assert server.work.questions["given"] > 1
    assert bucket.fetched_files == 1


def test_the_rest_comes_from_the_faster_source(world: PeerWorld) -> None:
    world.serves()
    # The task's clock stands still, so the peer appears to take no time.
    bucket = world.task()
    world.look_up(bucket, KEYS)
    before = world.remote.folder.fetched_bytes
    world.later.run()
    assert 0 < world.remote.folder.fetched_bytes - before <= BLOCK_BYTES, "the backend was measured once"
    (base_file,) = (world.base / "a").rglob("base-*.arrow")
    body = base_file.read_bytes()
    assert world.replica().read_bytes().startswith(body)
    assert world.given_bytes() > len(body) / 2
    assert lazy_files(world.store) == []


def test_a_peer_that_is_slower_than_the_store_is_not_asked(world: PeerWorld) -> None:
    world.serves()
    bucket = world.task()
    assert world.peers is not None
    world.peers._choice.note_peer(1, PIECE_BYTES, 2.0)
    world.peers._choice.note_store(1, PIECE_BYTES, 1.0)
    assert world.look_up(bucket, KEYS) > ENDS
    world.later.run()
    assert world.given_bytes() == 0
    assert lazy_files(world.store) == []


def test_a_scan_fetches_from_a_peer(world: PeerWorld) -> None:
    world.serves()
    bucket, before = world.task(), world.remote.folder.fetched_bytes
    assert bucket.read(lambda view: sum(batch.num_rows for batch in view.scan())) == len(world.remote.keys)
    (base_file,) = (world.base / "a").rglob("base-*.arrow")
    assert world.given_bytes() == base_file.stat().st_size
    assert world.remote.folder.fetched_bytes - before < 1 << 20, "the backend served only the two ends"


def test_an_interrupted_restore_sends_no_more_questions(world: PeerWorld) -> None:
    server = world.serves()
    bucket = world.task()
    world.look_up(bucket, KEYS)
    before = sum(server.work.questions.values())
    bucket.close()
    with pytest.raises(InterruptedRestoreError):
        bucket.read(lambda view: sum(batch.num_rows for batch in view.scan()))
    assert sum(server.work.questions.values()) == before


def test_a_peer_gives_pieces_that_the_backend_has_lost(world: PeerWorld) -> None:
    world.serves()
    bucket = world.task()
    world.look_up(bucket, KEYS)
    world.remote.folder.remove(SNAPSHOT_NAME)
    assert world.look_up(bucket, OTHERS) == 0
    assert bucket.fetched_files == 1


def test_only_peers_with_a_usable_record_are_asked(world: PeerWorld) -> None:
    """The record is missing, this host's own, damaged, or has no version for the bucket."""
    server = world.serves()
    members = Path(world.root.root) / "_standby" / "members"
    (path,) = members.iterdir()
    data = path.read_bytes()
    for harm in ("gone", "own", "damaged", "no version"):
        path.unlink(missing_ok=True)
        if harm == "own":
            world.tells(f"grpc://127.0.0.1:{server.port}", host="a")
        elif harm == "damaged":
            path.write_bytes(data[:-20] + bytes(20))
        elif harm == "no version":
            world.tells(f"grpc://127.0.0.1:{server.port}", host="c", version=0)
        store = LocalStore.at(world.base / harm, SCHEMA)
        assert world.look_up(world.task(store=store), KEYS) > ENDS, harm
        store.close()
    assert sum(server.work.questions.values()) == 0


def test_records_of_members_are_read_once_and_then_in_the_background(
    world: PeerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def record_read(root: Folder, host: str) -> Mapping[BucketKey, tuple[str, ...]]:
        reads.append(host)
        return peers_below(root, host)

    monkeypatch.setattr("spark_state_ext.peers.piece_requests.peers_below", record_read)
    bucket = world.task()
    for _ in range(3):
        world.look_up(bucket, KEYS)
        world.look_up(bucket, OTHERS)
        world.clock.sleep(100.0)
    assert reads == ["a"]
    # The background fill finds a new peer.
    world.serves()
    world.later.run()
    assert reads == ["a", "a"]
    assert world.given_bytes() > 0
    world.look_up(bucket, MORE)
    assert len(reads) == 2, "pieces that were fetched need no peer"


# -- peers that do not give -----------------------------------------------------------------------------


def test_a_task_with_another_secret_gets_no_pieces(world: PeerWorld, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "spark_state_ext")
    server = world.serves()
    bucket = world.task(secret=PeerSecret.of("not the secret of that peer"))
    assert world.look_up(bucket, KEYS) > ENDS
    assert world.look_up(bucket, OTHERS) > 0
    assert server.work.questions == {"given": 0, "gone": 0, "busy": 0, "refused": 1, "failed": 0, "left": 0}
    messages = [record.getMessage() for record in caplog.records]
    assert sum("needs the secret" in message for message in messages) == 1
    assert not any("not the secret of that peer" in message or SECRET_TEXT in message for message in messages)
    # The peer may have received the right secret since.
    world.clock.sleep(61.0)
    world.look_up(bucket, MORE)
    assert server.work.questions["refused"] == 2


class CountingShelf:
    """A shelf that counts questions before they are answered: the server counts them when the task has its answer."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf, self.questions = shelf, 0

    def find(self, key: BucketKey, ref: CheckpointRef, body_digest: str) -> SnapshotFile | None:
        self.questions += 1
        return self._shelf.find(key, ref, body_digest)


def test_a_peer_without_the_snapshot_is_asked_again_later(world: PeerWorld) -> None:
    shelf = CountingShelf(ReplicaShelf([]))
    server = world.serves(shelf)
    bucket = world.task()
    assert world.look_up(bucket, KEYS) > ENDS
    world.look_up(bucket, OTHERS)
    assert shelf.questions == 1
    world.clock.sleep(11.0)
    world.look_up(bucket, MORE)
    assert shelf.questions == 2, "the snapshot may have arrived"
    eventually(lambda: server.work.questions["gone"] == 2)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_pieces_of_a_dropped_replica_come_from_the_backend(world: PeerWorld, when: str) -> None:
    shelf = ReplicaShelf([world.followed()])
    path = world.replica()

    class Dropping:
        def find(self, key: BucketKey, ref: CheckpointRef, body_digest: str) -> SnapshotFile | None:
            snapshot_file = shelf.find(key, ref, body_digest)
            path.unlink(missing_ok=True)
            return snapshot_file

    if when == "before":
        path.unlink()
    counting = CountingShelf(Dropping() if when == "meanwhile" else shelf)
    server = world.serves(counting)
    bucket = world.task()
    assert world.look_up(bucket, KEYS) > ENDS
    assert counting.questions == 1
    eventually(lambda: server.work.questions["gone"] == 1)


def test_the_next_peer_is_asked_if_the_first_one_fails(world: PeerWorld) -> None:
    world.serves()
    # This peer's record comes first, but its address has no server.
    world.tells("grpc://127.0.0.1:1", host="c")
    world.tells("no address", host="d", in_sync=False)
    bucket = world.task()
    assert world.look_up(bucket, KEYS) <= ENDS


def test_a_busy_peer_is_asked_again_later(world: PeerWorld) -> None:
    server = world.serves()
    slots = server._actions.slots
    while slots.acquire(blocking=False):
        pass
    bucket = world.task()
    assert world.look_up(bucket, KEYS) > ENDS
    assert server.work.questions["busy"] == 1
    slots.release()
    world.clock.sleep(11.0)
    assert world.look_up(bucket, OTHERS) == 0
    assert slots.acquire(blocking=False), "each answer releases its slot"


def test_damaged_pieces_of_a_peer_are_refused_and_logged_once(
    world: PeerWorld, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = CountingShelf(ReplicaShelf([world.followed()]))
    world.serves(shelf)
    data = bytearray(world.replica().read_bytes())
    for at in range(100, len(data), PIECE_BYTES):
        data[at] ^= 1
    world.replica().write_bytes(data)
    bucket = world.task()
    assert world.look_up(bucket, KEYS) > ENDS
    assert shelf.questions == 1
    assert sum("fails its checksum from byte" in record.getMessage() for record in caplog.records) == 1
    world.clock.sleep(300.0)
    world.later.run()
    assert shelf.questions == 1, "the peer is not asked again for a long time"
    assert lazy_files(world.store) == []


class Broken(flight.FlightServerBase):  # type: ignore[misc] # PyArrow has no types
    """A server that has the secret, and gives wrong answers."""

    def __init__(self, how: str, body: bytes) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.how, self.body, self.asked = how, body, 0

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        self.asked += 1
        question = PeerQuestion.decode(action.body.to_pybytes(), SECRET)
        secret, nonce = SECRET, question.nonce
        if self.how == "another secret":
            secret = PeerSecret.of("another secret, and no other reason")
        elif self.how == "another question":
            nonce = bytes(16)
        for number, (first, end) in enumerate(question.ranges):
            data = self.body[first * PIECE_BYTES : end * PIECE_BYTES]
            if self.how == "short":
                data = data[:-1]
            elif self.how == "zeros":
                data = bytes(len(data))
            answer = PeerAnswer(GIVEN, data).encode(secret, nonce, number + (self.how == "another number"))
            if self.how == "no answer":
                return
            if self.how == "raises":
                raise RuntimeError("it fails")
            if self.how == "nothing":
                answer = b""
            elif self.how == "no status":
                answer = answer[:16] + b"\7" + answer[17:]
            elif self.how == "large":
                answer += bytes(8 << 20)
            elif self.how == "one byte":
                answer = answer[:-1] + bytes([answer[-1] ^ 1])
            yield answer
        if self.how == "more":
            yield PeerAnswer(GIVEN, b"more").encode(SECRET, nonce, len(question.ranges))
        elif self.how == "busy at last":
            yield PeerAnswer(BUSY).encode(SECRET, nonce, len(question.ranges))


@pytest.mark.parametrize(
    "how",
    [
        "another secret",
        "another question",
        "another number",
        "short",
        "zeros",
        "no answer",
        "raises",
        "nothing",
        "no status",
        "large",
        "one byte",
        "more",
        "busy at last",
    ],
)
def test_a_server_with_wrong_answers_is_not_asked_again(world: PeerWorld, how: str) -> None:
    world.followed()
    server = Broken(how, world.replica().read_bytes())
    try:
        world.tells(f"grpc://127.0.0.1:{server.port}")
        bucket = world.task()
        world.look_up(bucket, KEYS)
        world.look_up(bucket, OTHERS)
        assert server.asked == 1, "the server is not asked again"
        for lazy in lazy_files(world.store):
            for piece in np.setdiff1d(np.arange(lazy.pieces), lazy.absent()).tolist():
                lazy.index.check(piece, lazy._piece_bytes(piece), "the file")
    finally:
        server.shutdown()


# -- questions ------------------------------------------------------------------------------------------


def ask_server(server: Any, question: PeerQuestion) -> list[bytes]:
    client = PeerClient(f"grpc://127.0.0.1:{server.port}", None)
    try:
        return [bytes(answer) for answer in client.ask(question.encode(SECRET), WAIT_S)]
    finally:
        client.close()


@pytest.mark.parametrize(
    ("key", "ref", "digest", "first"),
    [
        (BucketKey("..", "..", 3), LAST, None, 0),
        (BucketKey("counts", "../counts/query", 3), LAST, None, 0),
        (BucketKey("counts", "query", 4), LAST, None, 0),
        (KEY, FIRST, None, 0),
        (KEY, LAST, "0" * 32, 0),
        (KEY, LAST, None, 10**6),
        (KEY, LAST, None, 10**18),
    ],
)
def test_a_question_for_a_snapshot_that_is_not_there_is_refused(
    world: PeerWorld, key: BucketKey, ref: CheckpointRef, digest: str | None, first: int
) -> None:
    server = world.serves()
    world.look_up(world.task(), KEYS)
    (lazy,) = lazy_files(world.store)
    question = PeerQuestion(key, ref, digest or digest_crcs(lazy.run.blocks), ((first, first + 1),))
    (answer,) = ask_server(server, question)
    assert len(answer) == 17
    assert server.work.questions["gone"] == 1


def test_a_server_answers_no_other_calls(world: PeerWorld) -> None:
    server = world.serves()
    client = flight.FlightClient(f"grpc://127.0.0.1:{server.port}")
    question = PeerQuestion(KEY, LAST, "0" * 32, ((0, 1),)).encode(SECRET)
    for body in (b"", b"x", question[:-1], question[:16], question + bytes(128 << 10), bytes(16) + question[16:]):
        with pytest.raises(flight.FlightUnauthenticatedError, match="needs the secret"):
            list(client.do_action(flight.Action(PIECES_ACTION, body)))
    with pytest.raises(flight.FlightUnauthenticatedError, match="needs the secret"):
        list(client.do_action(flight.Action("another", question)))
    descriptor = flight.FlightDescriptor.for_path("x")
    others: list[Callable[[], Any]] = [
        lambda: list(client.list_flights()),
        lambda: list(client.list_actions()),
        lambda: client.get_flight_info(descriptor),
        lambda: client.get_schema(descriptor),
        lambda: client.do_get(flight.Ticket(b"x")).read_all(),
        lambda: client.do_put(descriptor, SCHEMA.arrow)[1].read(),
        lambda: client.do_exchange(descriptor)[1].read_chunk(),
    ]
    for call in others:
        # For a schema, PyArrow's client raises OSError instead.
        with pytest.raises((pa.ArrowNotImplementedError, OSError), match="Method not found") as refused:
            call()
        assert "Traceback" not in str(refused.value)
    assert server.work.questions["refused"] == 7
    assert server.work.given_bytes == 0
    client.close()


def test_the_number_of_connections_is_limited(world: PeerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection needs a file descriptor, which the service also needs for its record and its local stores."""
    monkeypatch.setattr("spark_state_ext.peers.server._CONNECTIONS_MAX", 8)
    server = world.serves()
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), WAIT_S)) for _ in range(40)]
        # The server sends its settings on each connection that it accepts, and closes the others.
        assert sum(bool(connection.recv(1)) for connection in idle) == 8

    def is_answered() -> bool:
        try:
            return len(ask_server(server, PeerQuestion(KEY, LAST, "0" * 32, ((0, 1),)))) == 1
        except PeerError:
            return False

    # The server first has to see that the other connections are closed.
    eventually(is_answered)


def test_a_client_that_disconnects_frees_its_slot(world: PeerWorld) -> None:
    server = world.serves()
    world.look_up(world.task(), KEYS)
    (lazy,) = lazy_files(world.store)
    ranges = tuple((0, 256) for _ in range(4))
    question = PeerQuestion(KEY, LAST, digest_crcs(lazy.run.blocks), ranges)

    def ask_and_leave() -> None:
        before = sum(server.work.questions.values())
        client = PeerClient(f"grpc://127.0.0.1:{server.port}", None)
        answers = client.ask(question.encode(SECRET), WAIT_S)
        next(answers)
        answers.close()
        client.close()
        # The server sees later than the client that the connection is closed.
        eventually(lambda: sum(server.work.questions.values()) > before)

    for _ in range(20):
        ask_and_leave()
    assert server.work.questions["busy"] == 0
    eventually(lambda: len(ask_server(server, question)) == 4)


# -- TLS ------------------------------------------------------------------------------------------------


def test_peers_use_tls_only_with_a_trusted_certificate(world: PeerWorld, caplog: pytest.LogCaptureFixture) -> None:
    base_file = certified()
    server = world.serves(tls=base_file)
    assert world.look_up(world.task(ca=base_file.certificate), KEYS) <= ENDS
    assert server.work.given_bytes > 0
    assert "BEGIN" not in repr(base_file).replace(repr(base_file.certificate), "")
    # Wrong certificate authority, one unknown to the system, and a peer without TLS.
    for ca in (certified().certificate, None):
        store = LocalStore.at(world.base / f"other{ca is None}", SCHEMA)
        assert world.look_up(world.task(ca=ca, store=store), KEYS) > ENDS
        store.close()
    world.tells(f"grpc://127.0.0.1:{server.port}")
    store = LocalStore.at(world.base / "plain", SCHEMA)
    assert world.look_up(world.task(ca=base_file.certificate, store=store), KEYS) > ENDS
    store.close()
    assert any("has no TLS" in record.getMessage() for record in caplog.records)


def test_a_server_that_cannot_listen_raises_an_error(world: PeerWorld) -> None:
    server = world.serves()
    with pytest.raises(StorageError, match=r"cannot be answered on 999\.1\.1\.1:0.*--peer-listen"):
        PeerServer("999.1.1.1", 0, SECRET, ReplicaShelf([]))
    assert server.port


# -- processes ------------------------------------------------------------------------------------------


@pytest.fixture
def service(world: PeerWorld) -> Iterator[subprocess.Popen[str]]:
    """The standby service of host b, which has a replica and publishes it."""
    write_settings(world.root, StandbySettings(heartbeat_s=0.2))
    process = service_of(world, "--port", "0", "--address", "127.0.0.1")
    try:
        eventually(lambda: peers_below(world.root, "a").get(KEY) or process.poll() is not None)
        assert process.poll() is None, process.stderr and process.stderr.read()
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def check_large_requests_are_refused(pid: int, address: str) -> None:
    """Send 16 MiB in calls without the secret, plain and compressed: the service must not read them."""

    def peak_mib() -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) >> 10

    large, before = bytes(16 << 20), peak_mib()
    plain = flight.FlightClient(f"grpc://{address}")
    compressing = flight.FlightClient(f"grpc://{address}", generic_options=[("grpc.default_compression_algorithm", 2)])
    calls: list[Callable[[], Any]] = [
        lambda: list(plain.do_action(flight.Action(PIECES_ACTION, large))),
        lambda: plain.do_get(flight.Ticket(large)).read_all(),
        lambda: list(compressing.do_action(flight.Action(PIECES_ACTION, large))),
    ]
    for call in calls:
        with pytest.raises((pa.ArrowException, OSError)):
            call()
    assert peak_mib() - before < 16
    plain.close()
    compressing.close()


def test_the_standby_service_gives_pieces_to_peers(world: PeerWorld, service: subprocess.Popen[str]) -> None:
    assert service.stderr is not None
    output = service.stderr.readline()
    assert "; peers ask grpc://127.0.0.1:" in output
    assert SECRET_TEXT not in output
    assert world.look_up(world.task(), KEYS) <= ENDS
    check_large_requests_are_refused(service.pid, output.split("grpc://")[1].split(";")[0])
    port = output.split("port ")[-1].split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert f"spark_state_ext_standby_peer_bytes_total {float(world.given_bytes())}" in lines
    assert any(line.startswith('spark_state_ext_standby_peer_questions_total{outcome="given"}') for line in lines)
    service.send_signal(signal.SIGTERM)
    assert service.wait(WAIT_S) == 0


def test_a_lookup_succeeds_if_a_peer_hangs(world: PeerWorld, service: subprocess.Popen[str]) -> None:
    bucket = world.task(answer_s_max=1.0)
    world.look_up(bucket, KEYS)
    os.kill(service.pid, signal.SIGSTOP)
    assert world.look_up(bucket, OTHERS) > 0
    world.later.run()
    assert lazy_files(world.store) == []


def test_a_lookup_succeeds_if_a_peer_is_killed_during_a_question(
    world: PeerWorld, service: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, question_sent = PeerClient.ask, threading.Event()

    def ask(client: PeerClient, question: bytes, timeout_s: float) -> Generator[memoryview, None, None]:
        question_sent.set()
        return real(client, question, timeout_s)

    bucket = world.task()
    assert world.look_up(bucket, KEYS) <= ENDS
    # The peer receives the question, does not answer, and is killed.
    os.kill(service.pid, signal.SIGSTOP)
    monkeypatch.setattr(PeerClient, "ask", ask)
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(world.look_up(bucket, OTHERS)))
    thread.start()
    assert question_sent.wait(WAIT_S)
    service.kill()
    thread.join(WAIT_S)
    assert done
    assert done[0] > 0
    world.look_up(bucket, MORE)


def test_a_forked_child_ends_after_its_parent_has_used_a_client(world: PeerWorld) -> None:
    server = world.serves()
    world.look_up(world.task(), KEYS)
    (lazy,) = lazy_files(world.store)
    question = PeerQuestion(KEY, LAST, digest_crcs(lazy.run.blocks), ((0, 2),)).encode(SECRET)
    script = f"""
import os, sys
from spark_state_ext.peers.client import PeerClient
client = PeerClient("grpc://127.0.0.1:{server.port}", None)
for end in (sys.exit, os._exit):
    assert len(list(client.ask({question!r}, 60.0))) == 1
    pid = os.fork()
    if not pid:
        del client
        end(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
assert len(list(client.ask({question!r}, 60.0))) == 1
client.close()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr


def test_modules_without_peers_do_not_import_flight() -> None:
    script = """
import sys
import spark_state_ext.engine.bucket, spark_state_ext.engine.process_state, spark_state_ext.standby.roots
import spark_state_ext.standby.metrics, spark_state_ext.cli.standby_service
flight_modules = [name for name in sys.modules if "flight" in name]
assert not flight_modules, flight_modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_service_exports_metrics_of_its_peer_server(world: PeerWorld) -> None:
    server = world.serves()
    world.look_up(world.task(), KEYS)
    web = Web("127.0.0.1", 0, lambda: "", StandbyCollector(StandbyService([], 1.0), server.work))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{web.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
    finally:
        web.close()
    assert f"spark_state_ext_standby_peer_bytes_total {float(server.work.given_bytes)}" in lines
    assert 'spark_state_ext_standby_peer_questions_total{outcome="refused"} 0.0' in lines
