"""Messages between peers, the choice between peers and the backend, and the settings of services and tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_support import KEY, SECRET, SECRET_TEXT, certified

from arrow_schemas.blocks import BLOCK_BYTES, PIECE_BYTES
from arrow_schemas.errors import CorruptFileError, UsageError, VersionSkewError
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.peers import (
    ANSWER_BYTES_MAX,
    BUSY,
    GIVEN,
    GONE,
    PeerAnswer,
    PeerQuestion,
    PeerSecret,
    split_into_questions,
)
from spark_state_ext.cli.standby_service import PeerOptions, build_addresses, serve_peers
from spark_state_ext.peers.choice import Choice, Measure, asks_peers
from spark_state_ext.peers.piece_requests import PeersByRoot
from spark_state_ext.peers.settings import PeerSettings, peer_settings
from spark_state_ext.worker.host import machine_name
from tests.helpers.clock import VirtualClock

QUESTION = PeerQuestion(KEY, CheckpointRef(7, "a" * 32), "0" * 32, ((0, 1), (5, 9)), bytes(range(16)))
ANOTHER = PeerSecret.of("another secret, of which nobody knows")
NONCE = QUESTION.nonce


def test_a_question_round_trips_without_its_secret() -> None:
    data = QUESTION.encode(SECRET)
    assert PeerQuestion.decode(data, SECRET) == QUESTION
    assert SECRET_TEXT.encode() not in data
    assert SECRET.key not in data
    assert replace(QUESTION, nonce=PeerQuestion(*get_fields(QUESTION)).nonce) != QUESTION, "each has its own nonce"
    with pytest.raises(CorruptFileError, match="different secrets"):
        PeerQuestion.decode(data, ANOTHER)


def get_fields(question: PeerQuestion) -> tuple[Any, ...]:
    return question.key, question.ref, question.body_digest, question.ranges


@given(at=st.integers(0, len(QUESTION.encode(SECRET)) - 1), bit=st.integers(0, 7))
def test_a_question_with_a_changed_bit_is_refused(at: int, bit: int) -> None:
    data = bytearray(QUESTION.encode(SECRET))
    data[at] ^= 1 << bit
    with pytest.raises(CorruptFileError):
        PeerQuestion.decode(bytes(data), SECRET)


@given(st.binary(max_size=100))
def test_random_bytes_are_refused_as_a_question(data: bytes) -> None:
    with pytest.raises(CorruptFileError):
        PeerQuestion.decode(data, SECRET)


@given(status=st.sampled_from([GIVEN, GONE, BUSY]), data=st.binary(max_size=50), number=st.integers(0, 2**32 - 1))
def test_an_answer_round_trips_for_its_secret_nonce_and_number(status: int, data: bytes, number: int) -> None:
    data_of_answer = memoryview(PeerAnswer(status, data).encode(SECRET, NONCE, number))
    answer = PeerAnswer.decode(data_of_answer, SECRET, NONCE, number)
    assert (answer.status, bytes(answer.data)) == (status, data)
    for secret, nonce, at in (
        (ANOTHER, NONCE, number),
        (SECRET, bytes(16), number),
        (SECRET, NONCE, (number + 1) % 2**32),
    ):
        with pytest.raises(CorruptFileError):
            PeerAnswer.decode(data_of_answer, secret, nonce, at)


@given(at=st.integers(0, 26), bit=st.integers(0, 7))
def test_an_answer_with_a_changed_bit_is_refused(at: int, bit: int) -> None:
    data = bytearray(PeerAnswer(GIVEN, b"0123456789").encode(SECRET, NONCE, 3))
    data[at] ^= 1 << bit
    with pytest.raises(CorruptFileError):
        PeerAnswer.decode(memoryview(data), SECRET, NONCE, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"bucket": -1},
        {"bucket": True},
        {"operator": ""},
        {"query_folder": 5},
        {"version": "7"},
        {"id": None},
        {"body_digest": "0" * 31},
        {"nonce": "00"},
        {"nonce": 5},
        {"ranges": []},
        {"ranges": [[0, 0]]},
        {"ranges": [[-1, 1]]},
        {"ranges": [[0, BLOCK_BYTES // PIECE_BYTES + 1]]},
        {"ranges": [[0, 1.5]]},
        {"ranges": [[0]]},
        {"ranges": [[0, 1]] * 1025},
        {"ranges": [[0, 256]] * 5},
        {"ranges": None},
        {"format": None},
    ],
)
def test_a_question_with_invalid_fields_is_refused(change: dict[str, Any]) -> None:
    fields = {**json.loads(QUESTION.encode(SECRET)[16:]), **change}
    data = json.dumps(fields).encode()
    with pytest.raises(CorruptFileError, match="question"):
        PeerQuestion.decode(SECRET.proof(b"a question", data) + data, SECRET)


def test_a_question_of_a_newer_format_raises_version_skew() -> None:
    data = json.dumps({**json.loads(QUESTION.encode(SECRET)[16:]), "format": 2}).encode()
    with pytest.raises(VersionSkewError, match="format 2"):
        PeerQuestion.decode(SECRET.proof(b"a question", data) + data, SECRET)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 256)), max_size=3_000))
def test_ranges_are_split_into_questions_of_limited_size(sizes: list[tuple[int, int]]) -> None:
    ranges = [(first, first + count) for first, count in sizes]
    questions = list(split_into_questions(ranges))
    assert [piece_range for question in questions for piece_range in question] == ranges
    for question in questions:
        assert PeerQuestion(KEY, QUESTION.ref, "0" * 32, question).ranges == question
        assert sum(end - first for first, end in question) * PIECE_BYTES <= ANSWER_BYTES_MAX


def test_the_text_of_settings_and_questions_shows_no_secret() -> None:
    settings = peer_settings({"SPARK_STATE_EXT_PEER_SECRET": SECRET_TEXT})
    assert settings == PeerSettings(SECRET, None, 1.0)
    for text in (repr(settings), str(settings), repr(SECRET), f"{QUESTION.encode(SECRET)!r}"):
        assert SECRET_TEXT not in text
        assert SECRET.key.hex() not in text
        assert repr(SECRET.key) not in text


def test_peer_settings_come_from_the_environment(tmp_path: Path) -> None:
    assert peer_settings({}) is None
    assert peer_settings({"SPARK_STATE_EXT_PEER_SECRET": ""}) is None
    with pytest.raises(UsageError, match="has 5 characters: take at least 16"):
        peer_settings({"SPARK_STATE_EXT_PEER_SECRET": " short "})
    environment = {"SPARK_STATE_EXT_PEER_SECRET": SECRET_TEXT, "SPARK_STATE_EXT_PEER_CA": str(tmp_path / "ca.pem")}
    with pytest.raises(UsageError, match=r"SPARK_STATE_EXT_PEER_CA names .* cannot be read"):
        peer_settings(environment)
    (tmp_path / "ca.pem").write_bytes(b"no certificate")
    with pytest.raises(UsageError, match="not a PEM file"):
        peer_settings(environment)
    (tmp_path / "ca.pem").write_bytes(certified().certificate)
    settings = peer_settings(environment)
    assert settings is not None
    assert settings.ca == (tmp_path / "ca.pem").read_bytes()


def test_a_process_has_one_peers_object_for_each_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_STATE_EXT_PEER_SECRET", raising=False)
    assert PeersByRoot().of("memory://peers-of", {}) is None
    monkeypatch.setenv("SPARK_STATE_EXT_PEER_SECRET", SECRET_TEXT)
    known = PeersByRoot()
    peers = known.of("memory://peers-of", {})
    assert peers is not None
    assert known.of("memory://peers-of", {}) is peers
    assert known.of("memory://peers-of", {"use_listings_cache": False}) is not peers
    known.close()


# -- the choice -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer_s", "store_s", "batch", "background"),
    [
        (None, None, True, True),
        (1.0, None, True, False),
        (None, 1.0, True, True),
        (1.0, 2.0, True, True),
        (2.0, 1.0, False, False),
        (1.0, 1.0, True, True),
    ],
)
def test_the_faster_source_is_used(peer_s: float | None, store_s: float | None, batch: bool, background: bool) -> None:
    peer, store = (None if it is None else Measure(it, 0.0) for it in (peer_s, store_s))
    assert asks_peers(peer, store, 1.0, in_background=False) is batch
    assert asks_peers(peer, store, 1.0, in_background=True) is background


def test_old_measurements_are_repeated_only_in_the_background() -> None:
    peer, store = Measure(2.0, 0.0), Measure(1.0, 50.0)
    assert asks_peers(peer, store, 61.0, in_background=True)
    assert not asks_peers(peer, store, 61.0, in_background=False)
    assert not asks_peers(Measure(1.0, 61.0), Measure(2.0, 0.0), 61.0, in_background=True)


def test_measurements_follow_changes_of_speed() -> None:
    clock = VirtualClock()
    choice = Choice(clock)
    choice.note_peer(1, 1 << 20, 0.1)
    choice.note_store(1, 1 << 20, 0.2)
    assert choice.asks_peers(in_background=False)
    for _ in range(3):
        choice.note_peer(1, 1 << 20, 0.4)
    assert not choice.asks_peers(in_background=False)
    clock.sleep(61.0)
    # Old measurements do not count.
    choice.note_peer(1, 1 << 20, 0.1)
    assert choice.asks_peers(in_background=False)
    # A request counts as at least 64 KiB, so many small requests do not appear slow.
    other = Choice(clock)
    other.note_peer(16, 16 * PIECE_BYTES, 0.1)
    other.note_store(1, 1 << 20, 0.11)
    assert other.asks_peers(in_background=False)


# -- the service's options ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "environ", "problem"),
    [
        (PeerOptions(address="b"), {}, "need --peer-listen"),
        (PeerOptions("9465"), {"SPARK_STATE_EXT_PEER_SECRET": SECRET_TEXT}, "give HOST:PORT"),
        (PeerOptions("0.0.0.0:99999"), {"SPARK_STATE_EXT_PEER_SECRET": SECRET_TEXT}, "give HOST:PORT"),
        (PeerOptions("grpc://h:1"), {"SPARK_STATE_EXT_PEER_SECRET": SECRET_TEXT}, "give HOST:PORT"),
        (PeerOptions("127.0.0.1:0"), {}, "set SPARK_STATE_EXT_PEER_SECRET, or give --peer-secret-file"),
        (PeerOptions("127.0.0.1:0"), {"SPARK_STATE_EXT_PEER_SECRET": "x"}, "take at least 16"),
        (PeerOptions("127.0.0.1:0", secret_file=Path("/no/such")), {}, "--peer-secret-file /no/such cannot be read"),
        (
            PeerOptions("127.0.0.1:0", certificate=Path("/no/such")),
            {"SPARK_STATE_EXT_PEER_SECRET": SECRET_TEXT},
            "both --peer-tls-cert and --peer-tls-key",
        ),
        (
            PeerOptions("127.0.0.1:0", certificate=Path("/no/such"), key=Path("/no/such")),
            {"SPARK_STATE_EXT_PEER_SECRET": SECRET_TEXT},
            "--peer-tls-cert names /no/such",
        ),
    ],
)
def test_invalid_service_options_are_refused(options: PeerOptions, environ: dict[str, str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        serve_peers(options, [], environ)


def test_a_service_listens_and_publishes_its_address(tmp_path: Path) -> None:
    assert serve_peers(PeerOptions(), [], {}) is None
    assert build_addresses(None, PeerOptions()) == {}
    tls = certified()
    for name, data in (("secret", f"{SECRET_TEXT}\n".encode()), ("cert", tls.certificate), ("key", tls.key)):
        (tmp_path / name).write_bytes(data)
    options = PeerOptions("127.0.0.1:0", None, tmp_path / "secret", tmp_path / "cert", tmp_path / "key")
    server = serve_peers(options, [], {})
    assert server is not None
    try:
        assert build_addresses(server, options) == {"flight": f"grpc+tls://{machine_name()}:{server.port}"}
        assert build_addresses(server, replace(options, address="b.example")) == {
            "flight": f"grpc+tls://b.example:{server.port}"
        }
    finally:
        server.close()
