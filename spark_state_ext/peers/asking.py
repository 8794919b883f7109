"""Having peers give the pieces of a snapshot that a lookup needs, before the store is asked for what is left.

Nothing depends on a peer: every piece is compared with its checksum in the index of the store's own file, a question
takes a bounded time, and a peer that fails is left alone for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from arrow_schemas.blocks import PIECE_BYTES, digest_of
from arrow_schemas.peers import BUSY, GONE, PeerAnswer, PeerQuestion, in_questions
from arrow_schemas.standby import BucketKey
from spark_state_ext.errors import CorruptFileError, PeerError, PeerGoneError, StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.peers.choice import Choice
from spark_state_ext.peers.finding import peers_below
from spark_state_ext.peers.settings import PeerSettings, peer_settings
from spark_state_ext.store.lazy_file import LazyFile
from spark_state_ext.worker.host import host_name

if TYPE_CHECKING:
    from spark_state_ext.peers.client import PeerClient

__all__ = ["Peers", "PeersByRoot"]

_LOGGER = logging.getLogger("spark_state_ext")
# No slower may bytes come.
_BYTES_PER_S_MIN = 20_000_000
# How long a peer is left alone that failed; that gave other bytes; and that does not have a snapshot (yet).
_FAILED_S, _DAMAGED_S, _GONE_S = 60.0, 600.0, 10.0
# What hosts tell is looked at again after this time.
_KNOWN_S = 30.0
# Peers that one fetch asks, one after the other.
_ASKED_MAX = 2
_LEFT_ALONE_MAX = 1_000


class Peers:
    """The peers of a root, as a worker process knows them; several threads may ask."""

    def __init__(
        self, root: Folder, settings: PeerSettings, host: str, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._settings, self._host, self._clock_s = root, settings, host, clock_s
        self._choice = Choice(clock_s)
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._known: Mapping[BucketKey, tuple[str, ...]] = {}
        self._known_s: float | None = None
        self._clients: dict[str, PeerClient] = {}
        # Until when an address is not asked at all, or not for a snapshot.
        self._left_alone_s: dict[tuple[str, str], float] = {}
        # Bytes that they have given.
        self.given_bytes = 0

    def give(
        self,
        key: BucketKey,
        lazy: LazyFile,
        ranges: Sequence[tuple[int, int]],
        beside: bool,
        raise_if_closed: Callable[[], None],
    ) -> None:
        """Have peers give pieces of a file, and put them there; what they do not give lacks then as before."""
        if not self._choice.asks_peers(beside):
            return
        digest = digest_of(lazy.run.blocks)
        for address in self._having(key, digest, beside)[:_ASKED_MAX]:
            lacking = [it for it in ranges if len(lazy.absent(it[0], it[1] - it[0]))]
            if not lacking or self._given(address, key, lazy, lacking, beside, raise_if_closed):
                return

    def note_store(self, requests: int, size_bytes: int, took_s: float) -> None:
        """The store has given bytes, and nobody waited for them."""
        self._choice.note_store(requests, size_bytes, took_s)

    def close(self) -> None:
        """Let go of the connections."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    # -- one of them --------------------------------------------------------------------------------

    def _given(
        self,
        address: str,
        key: BucketKey,
        lazy: LazyFile,
        ranges: Sequence[tuple[int, int]],
        beside: bool,
        raise_if_closed: Callable[[], None],
    ) -> bool:
        """Whether a peer has given all."""
        started_s, given_bytes, digest = self._clock_s(), 0, digest_of(lazy.run.blocks)
        try:
            client = self._client(address)
            for some in in_questions(ranges):
                raise_if_closed()
                given_bytes += self._ask(client, PeerQuestion(key, lazy.run.newest, digest, some), lazy)
        except PeerGoneError as error:
            _LOGGER.debug("%s", error)
            self._leave_alone(address, digest, _GONE_S)
            return False
        except PeerError as error:
            self._tell(address, _FAILED_S, error)
            return False
        except CorruptFileError as error:
            self._tell(address, _DAMAGED_S, error)
            return False
        if beside:
            self._choice.note_peer(len(ranges), given_bytes, self._clock_s() - started_s)
        return True

    def _ask(self, client: PeerClient, question: PeerQuestion, lazy: LazyFile) -> int:
        """Put all answers to a question there; their bytes."""
        secret, where = self._settings.secret, f"what the peer {client.address} gives"
        size_bytes = sum(end - first for first, end in question.ranges) * PIECE_BYTES
        number = given_bytes = 0
        with closing(client.ask(question.encode(secret), self._timeout_s(size_bytes))) as answers:
            for number, data in enumerate(answers, 1):
                if number > len(question.ranges):
                    raise CorruptFileError(f"{where} is more than it was asked for")
                answer = PeerAnswer.decode(data, secret, question.nonce, number - 1)
                if answer.status in (GONE, BUSY):
                    why = "does not have" if answer.status == GONE else "is too busy to give"
                    raise PeerGoneError(f"the peer {client.address} {why} {question.ref} of {question.key}")
                first, end = question.ranges[number - 1]
                if len(answer.data) != min(end * PIECE_BYTES, lazy.index.body_bytes) - first * PIECE_BYTES:
                    raise CorruptFileError(f"{where} is not what it was asked for")
                lazy.put(first, answer.data, where)
                given_bytes += len(answer.data)
                with self._lock:
                    self.given_bytes += len(answer.data)
        if number != len(question.ranges):
            raise PeerError(f"the peer {client.address} gave {number} of {len(question.ranges)} ranges")
        return given_bytes

    def _client(self, address: str) -> PeerClient:
        try:
            from spark_state_ext.peers.client import PeerClient
        except ImportError as error:
            raise PeerError(f"peers cannot be asked, as this PyArrow has no Flight: {error}") from error
        if self._settings.ca is not None and not address.startswith("grpc+tls://"):
            raise PeerError(f"the peer {address} is not asked, as SPARK_STATE_EXT_PEER_CA is set and it has no TLS")
        with self._lock:
            if address not in self._clients:
                self._clients[address] = PeerClient(address, self._settings.ca)
            return self._clients[address]

    def _timeout_s(self, size_bytes: int) -> float:
        return self._settings.answer_s_max + size_bytes / _BYTES_PER_S_MIN

    # -- who is asked -------------------------------------------------------------------------------

    def _having(self, key: BucketKey, digest: str, beside: bool) -> list[str]:
        """Addresses to ask. Whoever asks first looks; after that only who has time does."""
        now_s = self._clock_s()
        if self._known_s is None or (beside and now_s - self._known_s > _KNOWN_S):
            with self._looking:
                # Another one may have looked meanwhile.
                if self._known_s is None or self._known_s < now_s - _KNOWN_S:
                    self._known, self._known_s = self._looked(), now_s
        with self._lock:
            left_alone = {it for it, until_s in self._left_alone_s.items() if until_s > now_s}
        its = (it for it in self._known.get(key, ()) if not left_alone & {(it, ""), (it, digest)})
        return list(its)

    def _looked(self) -> Mapping[BucketKey, tuple[str, ...]]:
        try:
            return peers_below(self._root, self._host)
        except StateError as error:
            _LOGGER.warning("peers are not asked, as nobody knows who has what: %s", error)
            return {}

    def _tell(self, address: str, for_s: float, error: StateError) -> None:
        self._leave_alone(address, "", for_s)
        _LOGGER.warning("%s. It is not asked for %.0f s; the store is", error, for_s)

    def _leave_alone(self, address: str, digest: str, for_s: float) -> None:
        with self._lock:
            now_s = self._clock_s()
            if len(self._left_alone_s) >= _LEFT_ALONE_MAX:
                self._left_alone_s = {about: until for about, until in self._left_alone_s.items() if until > now_s}
            self._left_alone_s[address, digest] = now_s + for_s


class PeersByRoot:
    """Those of a worker process."""

    def __init__(self) -> None:
        # None: there is no secret.
        self._peers: dict[str, Peers | None] = {}

    def of(self, root: str, storage_options: Mapping[str, Any]) -> Peers | None:
        """The peers of a root; None where the environment has no secret. Nobody is asked for anything yet."""
        name = f"{root} {dict(storage_options)!r}"
        if name not in self._peers:
            settings = peer_settings()
            self._peers[name] = (
                None if settings is None else Peers(Folder(root, storage_options), settings, host_name())
            )
        return self._peers[name]

    def close(self) -> None:
        """Let go of all connections."""
        while self._peers:
            peers = self._peers.popitem()[1]
            if peers is not None:
                peers.close()
