"""What goes between peers, what decides who is asked, and what a service and a task are told of it."""

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


def test_a_question_goes_over_the_line() -> None:
    data = QUESTION.encode(SECRET)
    assert PeerQuestion.decode(data, SECRET) == QUESTION
    assert SECRET_TEXT.encode() not in data
    assert SECRET.key not in data
    assert replace(QUESTION, nonce=PeerQuestion(*_fields(QUESTION)).nonce) != QUESTION, "each has a nonce of its own"
    with pytest.raises(CorruptFileError, match="different secrets"):
        PeerQuestion.decode(data, ANOTHER)


def _fields(it: PeerQuestion) -> tuple[Any, ...]:
    return it.key, it.ref, it.body_digest, it.ranges


@given(at=st.integers(0, len(QUESTION.encode(SECRET)) - 1), bit=st.integers(0, 7))
def test_a_question_of_which_a_bit_was_changed_is_refused(at: int, bit: int) -> None:
    data = bytearray(QUESTION.encode(SECRET))
    data[at] ^= 1 << bit
    with pytest.raises(CorruptFileError):
        PeerQuestion.decode(bytes(data), SECRET)


@given(st.binary(max_size=100))
def test_no_bytes_are_a_question(data: bytes) -> None:
    with pytest.raises(CorruptFileError):
        PeerQuestion.decode(data, SECRET)


@given(status=st.sampled_from([GIVEN, GONE, BUSY]), data=st.binary(max_size=50), number=st.integers(0, 2**32 - 1))
def test_an_answer_goes_over_the_line(status: int, data: bytes, number: int) -> None:
    made = memoryview(PeerAnswer(status, data).encode(SECRET, NONCE, number))
    found = PeerAnswer.decode(made, SECRET, NONCE, number)
    assert (found.status, bytes(found.data)) == (status, data)
    for secret, nonce, at in (
        (ANOTHER, NONCE, number),
        (SECRET, bytes(16), number),
        (SECRET, NONCE, (number + 1) % 2**32),
    ):
        with pytest.raises(CorruptFileError):
            PeerAnswer.decode(made, secret, nonce, at)


@given(at=st.integers(0, 26), bit=st.integers(0, 7))
def test_an_answer_of_which_a_bit_was_changed_is_refused(at: int, bit: int) -> None:
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
def test_a_question_that_cannot_be_right_is_refused(change: dict[str, Any]) -> None:
    fields = {**json.loads(QUESTION.encode(SECRET)[16:]), **change}
    data = json.dumps(fields).encode()
    with pytest.raises(CorruptFileError, match="question"):
        PeerQuestion.decode(SECRET.proof(b"a question", data) + data, SECRET)


def test_a_question_of_a_newer_release_is_told() -> None:
    data = json.dumps({**json.loads(QUESTION.encode(SECRET)[16:]), "format": 2}).encode()
    with pytest.raises(VersionSkewError, match="format 2"):
        PeerQuestion.decode(SECRET.proof(b"a question", data) + data, SECRET)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 256)), max_size=3_000))
def test_ranges_are_asked_for_in_questions(sizes: list[tuple[int, int]]) -> None:
    ranges = [(first, first + count) for first, count in sizes]
    found = list(split_into_questions(ranges))
    assert [it for some in found for it in some] == ranges
    for some in found:
        assert PeerQuestion(KEY, QUESTION.ref, "0" * 32, some).ranges == some
        assert sum(end - first for first, end in some) * PIECE_BYTES <= ANSWER_BYTES_MAX


def test_no_text_shows_a_secret() -> None:
    settings = peer_settings({"SPARK_STATE_EXT_PEER_SECRET": SECRET_TEXT})
    assert settings == PeerSettings(SECRET, None, 1.0)
    for text in (repr(settings), str(settings), repr(SECRET), f"{QUESTION.encode(SECRET)!r}"):
        assert SECRET_TEXT not in text
        assert SECRET.key.hex() not in text
        assert repr(SECRET.key) not in text


def test_what_the_environment_says(tmp_path: Path) -> None:
    assert peer_settings({}) is None
    assert peer_settings({"SPARK_STATE_EXT_PEER_SECRET": ""}) is None
    with pytest.raises(UsageError, match="has 5 characters: take at least 16"):
        peer_settings({"SPARK_STATE_EXT_PEER_SECRET": " short "})
    given_both = {"SPARK_STATE_EXT_PEER_SECRET": SECRET_TEXT, "SPARK_STATE_EXT_PEER_CA": str(tmp_path / "ca.pem")}
    with pytest.raises(UsageError, match=r"SPARK_STATE_EXT_PEER_CA names .* cannot be read"):
        peer_settings(given_both)
    (tmp_path / "ca.pem").write_bytes(b"no certificate")
    with pytest.raises(UsageError, match="not a PEM file"):
        peer_settings(given_both)
    (tmp_path / "ca.pem").write_bytes(certified().certificate)
    found = peer_settings(given_both)
    assert found is not None
    assert found.ca == (tmp_path / "ca.pem").read_bytes()


def test_a_process_has_the_peers_of_each_root_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_STATE_EXT_PEER_SECRET", raising=False)
    assert PeersByRoot().of("memory://peers-of", {}) is None
    monkeypatch.setenv("SPARK_STATE_EXT_PEER_SECRET", SECRET_TEXT)
    known = PeersByRoot()
    one = known.of("memory://peers-of", {})
    assert one is not None
    assert known.of("memory://peers-of", {}) is one
    assert known.of("memory://peers-of", {"use_listings_cache": False}) is not one
    known.close()


# -- the choice -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer_s", "store_s", "batch", "beside"),
    [
        (None, None, True, True),
        (1.0, None, True, False),
        (None, 1.0, True, True),
        (1.0, 2.0, True, True),
        (2.0, 1.0, False, False),
        (1.0, 1.0, True, True),
    ],
)
def test_who_is_asked(peer_s: float | None, store_s: float | None, batch: bool, beside: bool) -> None:
    peer, store = (None if it is None else Measure(it, 0.0) for it in (peer_s, store_s))
    assert asks_peers(peer, store, 1.0, in_background=False) is batch
    assert asks_peers(peer, store, 1.0, in_background=True) is beside


def test_what_is_old_is_measured_anew_where_nobody_waits() -> None:
    peer, store = Measure(2.0, 0.0), Measure(1.0, 50.0)
    assert asks_peers(peer, store, 61.0, in_background=True)
    assert not asks_peers(peer, store, 61.0, in_background=False)
    assert not asks_peers(Measure(1.0, 61.0), Measure(2.0, 0.0), 61.0, in_background=True)


def test_measures_follow_what_changes() -> None:
    clock = VirtualClock()
    choice = Choice(clock)
    choice.note_peer(1, 1 << 20, 0.1)
    choice.note_store(1, 1 << 20, 0.2)
    assert choice.asks_peers(in_background=False)
    for _ in range(3):
        choice.note_peer(1, 1 << 20, 0.4)
    assert not choice.asks_peers(in_background=False)
    clock.sleep(61.0)
    # What was long ago says nothing.
    choice.note_peer(1, 1 << 20, 0.1)
    assert choice.asks_peers(in_background=False)
    # Requests count as 64 KiB: many small ones are not slow because they bring few bytes.
    other = Choice(clock)
    other.note_peer(16, 16 * PIECE_BYTES, 0.1)
    other.note_store(1, 1 << 20, 0.11)
    assert other.asks_peers(in_background=False)


# -- the service's options ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "environ", "told"),
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
def test_options_that_cannot_be_used(options: PeerOptions, environ: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        serve_peers(options, [], environ)


def test_options_that_can_be_used(tmp_path: Path) -> None:
    assert serve_peers(PeerOptions(), [], {}) is None
    assert build_addresses(None, PeerOptions()) == {}
    mine = certified()
    for name, data in (("secret", f"{SECRET_TEXT}\n".encode()), ("cert", mine.certificate), ("key", mine.key)):
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
