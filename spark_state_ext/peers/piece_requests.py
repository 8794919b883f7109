"""Asks peers for the pieces of a snapshot that a lookup needs; the store is then asked for the rest.

No result depends on a peer: every piece is compared with its checksum in the index of the store's own file, a question
takes a bounded time, and a peer that failed is not asked for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from arrow_schemas.blocks import PIECE_BYTES, digest_crcs
from arrow_schemas.peers import BUSY, GONE, PeerAnswer, PeerQuestion, split_into_questions
from arrow_schemas.standby import BucketKey
from spark_state_ext.errors import CorruptFileError, PeerError, PeerGoneError, StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.peers.choice import Choice
from spark_state_ext.peers.discovery import peers_below
from spark_state_ext.peers.settings import PeerSettings, peer_settings
from spark_state_ext.store.lazy_file import LazyFile
from spark_state_ext.worker.host import host_name

if TYPE_CHECKING:
    from spark_state_ext.peers.client import PeerClient

__all__ = ["Peers", "PeersByRoot"]

_LOGGER = logging.getLogger("spark_state_ext")
# A peer must send at least this many bytes per second.
_BYTES_PER_S_MIN = 20_000_000
# How long a peer is not asked after it failed, after it sent wrong bytes, and after it did not have a snapshot (yet).
_FAILED_S, _DAMAGED_S, _GONE_S = 60.0, 600.0, 10.0
# Records of hosts are read again after this time.
_LOOKED_UP_S = 30.0
# How many peers one fetch asks, one after the other.
_ASKED_MAX = 2
_PAUSED_MAX = 1_000


class Peers:
    """The peers of a root, as a worker process knows them. Thread-safe."""

    def __init__(
        self, root: Folder, settings: PeerSettings, host: str, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._settings, self._host, self._clock_s = root, settings, host, clock_s
        self._choice = Choice(clock_s)
        self._lock, self._look_up_lock = threading.Lock(), threading.Lock()
        self._addresses: Mapping[BucketKey, tuple[str, ...]] = {}
        self._looked_up_s: float | None = None
        self._clients: dict[str, PeerClient] = {}
        # Until when an address is not asked at all (""), or not asked for a snapshot (its digest).
        self._paused_until_s: dict[tuple[str, str], float] = {}
        # Bytes received from peers.
        self.given_bytes = 0

    def give(
        self,
        key: BucketKey,
        lazy: LazyFile,
        ranges: Sequence[tuple[int, int]],
        in_background: bool,
        raise_if_closed: Callable[[], None],
    ) -> None:
        """Get pieces of a file from peers, and write them to the file; the pieces they do not send stay missing."""
        if not self._choice.asks_peers(in_background):
            return
        digest = digest_crcs(lazy.run.blocks)
        for address in self._choose_addresses(key, digest, in_background)[:_ASKED_MAX]:
            missing = [each for each in ranges if len(lazy.absent(each[0], each[1] - each[0]))]
            if not missing or self._fetch(address, key, lazy, missing, in_background, raise_if_closed):
                return

    def note_store(self, requests: int, size_bytes: int, took_s: float) -> None:
        """Note that the store has sent bytes in the background."""
        self._choice.note_store(requests, size_bytes, took_s)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    # -- one peer -----------------------------------------------------------------------------------

    def _fetch(
        self,
        address: str,
        key: BucketKey,
        lazy: LazyFile,
        ranges: Sequence[tuple[int, int]],
        in_background: bool,
        raise_if_closed: Callable[[], None],
    ) -> bool:
        """Return True if a peer has sent all pieces."""
        started_s, given_bytes, digest = self._clock_s(), 0, digest_crcs(lazy.run.blocks)
        try:
            client = self._connect(address)
            for some_ranges in split_into_questions(ranges):
                raise_if_closed()
                given_bytes += self._ask(client, PeerQuestion(key, lazy.run.newest, digest, some_ranges), lazy)
        except PeerGoneError as error:
            _LOGGER.debug("%s", error)
            self._pause(address, digest, _GONE_S)
            return False
        except PeerError as error:
            self._note_failure(address, _FAILED_S, error)
            return False
        except CorruptFileError as error:
            self._note_failure(address, _DAMAGED_S, error)
            return False
        if in_background:
            self._choice.note_peer(len(ranges), given_bytes, self._clock_s() - started_s)
        return True

    def _ask(self, client: PeerClient, question: PeerQuestion, lazy: LazyFile) -> int:
        """Write all answers to a question to the file; return how many bytes they were."""
        secret, where = self._settings.secret, f"the answer of the peer {client.address}"
        size_bytes = sum(end - first for first, end in question.ranges) * PIECE_BYTES
        number = given_bytes = 0
        with closing(client.ask(question.encode(secret), self._timeout_s(size_bytes))) as answers:
            for number, data in enumerate(answers, 1):
                if number > len(question.ranges):
                    raise CorruptFileError(f"{where} has more ranges than the question")
                answer = PeerAnswer.decode(data, secret, question.nonce, number - 1)
                if answer.status in (GONE, BUSY):
                    why = "does not have" if answer.status == GONE else "is too busy to send"
                    raise PeerGoneError(f"the peer {client.address} {why} {question.ref} of {question.key}")
                first, end = question.ranges[number - 1]
                if len(answer.data) != min(end * PIECE_BYTES, lazy.index.body_bytes) - first * PIECE_BYTES:
                    raise CorruptFileError(f"{where} does not have the length of the range in the question")
                lazy.put(first, answer.data, where)
                given_bytes += len(answer.data)
                with self._lock:
                    self.given_bytes += len(answer.data)
        if number != len(question.ranges):
            raise PeerError(f"the peer {client.address} sent {number} of {len(question.ranges)} ranges")
        return given_bytes

    def _connect(self, address: str) -> PeerClient:
        try:
            from spark_state_ext.peers.client import PeerClient
        except ImportError as error:
            raise PeerError(f"cannot ask peers, as this PyArrow has no Flight: {error}") from error
        if self._settings.ca is not None and not address.startswith("grpc+tls://"):
            raise PeerError(f"cannot ask the peer {address}: SPARK_STATE_EXT_PEER_CA is set, but it has no TLS")
        with self._lock:
            if address not in self._clients:
                self._clients[address] = PeerClient(address, self._settings.ca)
            return self._clients[address]

    def _timeout_s(self, size_bytes: int) -> float:
        return self._settings.answer_s_max + size_bytes / _BYTES_PER_S_MIN

    # -- which peers to ask -------------------------------------------------------------------------

    def _choose_addresses(self, key: BucketKey, digest: str, in_background: bool) -> list[str]:
        """Return the addresses to ask. The first call reads the records; later only calls in the background do."""
        now_s = self._clock_s()
        if self._looked_up_s is None or (in_background and now_s - self._looked_up_s > _LOOKED_UP_S):
            with self._look_up_lock:
                # Another thread may have read the records meanwhile.
                if self._looked_up_s is None or self._looked_up_s < now_s - _LOOKED_UP_S:
                    self._addresses, self._looked_up_s = self._look_up_peers(), now_s
        with self._lock:
            paused = {entry for entry, until_s in self._paused_until_s.items() if until_s > now_s}
        addresses = (
            address for address in self._addresses.get(key, ()) if not paused & {(address, ""), (address, digest)}
        )
        return list(addresses)

    def _look_up_peers(self) -> Mapping[BucketKey, tuple[str, ...]]:
        try:
            return peers_below(self._root, self._host)
        except StateError as error:
            _LOGGER.warning("cannot ask peers, as the records of their replicas cannot be read: %s", error)
            return {}

    def _note_failure(self, address: str, for_s: float, error: StateError) -> None:
        self._pause(address, "", for_s)
        _LOGGER.warning("%s. The store is asked instead of this peer for %.0f s", error, for_s)

    def _pause(self, address: str, digest: str, for_s: float) -> None:
        with self._lock:
            now_s = self._clock_s()
            if len(self._paused_until_s) >= _PAUSED_MAX:
                self._paused_until_s = {
                    entry: until_s for entry, until_s in self._paused_until_s.items() if until_s > now_s
                }
            self._paused_until_s[address, digest] = now_s + for_s


class PeersByRoot:
    """The peers of a worker process, by root."""

    def __init__(self) -> None:
        # None if there is no secret.
        self._peers: dict[str, Peers | None] = {}

    def of(self, root: str, storage_options: Mapping[str, Any]) -> Peers | None:
        """Return the peers of a root, without contacting any; None if the environment has no secret."""
        name = f"{root} {dict(storage_options)!r}"
        if name not in self._peers:
            settings = peer_settings()
            self._peers[name] = (
                None if settings is None else Peers(Folder(root, storage_options), settings, host_name())
            )
        return self._peers[name]

    def close(self) -> None:
        """Close all connections."""
        while self._peers:
            peers = self._peers.popitem()[1]
            if peers is not None:
                peers.close()
