"""A task has the right rows after any sequence of actions of a peer and the backend during a lazy restore."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from peer_support import KEY, SECRET
from pyarrow import flight
from test_lazy_machine import LazyMachine

from arrow_schemas.blocks import PIECE_BYTES
from arrow_schemas.peers import BUSY, GIVEN, GONE, PeerAnswer, PeerQuestion, PeerSecret
from arrow_schemas.standby import MemberRecord, StandbyReplica
from spark_state_ext.files.folder import Folder
from spark_state_ext.peers.discovery import ADDRESS_KIND
from spark_state_ext.peers.piece_requests import Peers
from spark_state_ext.peers.settings import PeerSettings
from spark_state_ext.standby.members import Membership
from tests.helpers.clock import VirtualClock
from tests.helpers.soak import examples
from tests.helpers.waiting import WAIT_S

_WAYS = ["gives", "gone", "busy", "other bytes", "other secret", "ends", "fails"]


class ScriptedPeer(flight.FlightServerBase):  # type: ignore[misc] # PyArrow has no types
    """Gives some answers, then misbehaves in a chosen way."""

    def __init__(self, body: bytes) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.body, self.way, self.after = body, "gives", 0

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        question = PeerQuestion.decode(action.body.to_pybytes(), SECRET)
        for number, (first, end) in enumerate(question.ranges):
            data, secret, status = self.body[first * PIECE_BYTES : end * PIECE_BYTES], SECRET, GIVEN
            if number >= self.after:
                if self.way == "ends":
                    return
                if self.way == "fails":
                    raise RuntimeError("it fails")
                if self.way in ("gone", "busy"):
                    data, status = b"", GONE if self.way == "gone" else BUSY
                elif self.way == "other bytes":
                    data = bytes(len(data))
                elif self.way == "other secret":
                    secret = PeerSecret.of("another secret, and no other reason")
            yield PeerAnswer(status, data).encode(secret, question.nonce, number)


class PeerMachine(LazyMachine):
    """`LazyMachine` with a peer that is asked before the backend."""

    @initialize(bad_hashes=st.booleans())
    def begin(self, bad_hashes: bool) -> None:
        super().begin(bad_hashes)
        self.remote.pointer = replace(self.remote.pointer, query_folder=KEY.query_folder)
        self.bucket.read(count_runs)
        (run,) = self.store.runs()
        self.peer = ScriptedPeer(self.remote.snapshot[: run.file_bytes])
        root = Folder(str(self.scratch / "root"))
        address = f"grpc://127.0.0.1:{self.peer.port}"
        record = MemberRecord("b", replicas=(StandbyReplica(KEY, 2),), addresses={ADDRESS_KIND: address})
        Membership(root, "b", 10.0).heartbeat(record)
        self.clock = VirtualClock()
        self.asking = self.peers = Peers(root, PeerSettings(SECRET, answer_s_max=WAIT_S), "a", self.clock)
        self._call()

    @rule(way=st.sampled_from(_WAYS), after=st.integers(0, 3))
    def change_peer(self, way: str, after: int) -> None:
        self.peer.way, self.peer.after = way, after

    @rule(seconds=st.sampled_from([11.0, 61.0, 601.0]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass, after which a peer that was left alone is asked again."""
        self.clock.sleep(seconds)

    @rule(peer_s=st.sampled_from([0.1, 10.0]))
    def measure(self, peer_s: float) -> None:
        self.asking._choice.note_peer(1, PIECE_BYTES, peer_s)
        self.asking._choice.note_store(1, PIECE_BYTES, 1.0)

    def teardown(self) -> None:
        if hasattr(self, "peer"):
            self.asking.close()
            self.peer.shutdown()
        super().teardown()


def count_runs(view: Any) -> int:
    """Return the number of runs, which needs no rows."""
    return len(view.runs)


TestPeerMachine = PeerMachine.TestCase
TestPeerMachine.settings = settings(max_examples=examples(15, 300), stateful_step_count=15)


@pytest.mark.parametrize("way", _WAYS)
def test_each_misbehaviour_of_the_peer_takes_effect(way: str) -> None:
    """The peer always gives some pieces, and leaves others to the backend unless it gives all of them."""
    machine = PeerMachine()
    try:
        machine.begin(bad_hashes=False)
        machine.change_peer(way, 1)
        machine.look_up([5, 6_001, 11_111])
        machine.look_up([77, 8_001])
        given_bytes, store_bytes = machine.asking.given_bytes, machine.remote.folder.fetched_bytes
        machine.scan()
        assert given_bytes > 0
        assert (machine.remote.folder.fetched_bytes == store_bytes) == (way == "gives")
    finally:
        machine.teardown()
