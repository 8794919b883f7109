"""What a peer is asked for pieces of a snapshot, and what it answers: bodies of Arrow Flight actions.

A question is a proof and a JSON document; an answer is a proof, a status and the bytes of some pieces. A proof is a
keyed BLAKE2b: only who has the secret can make one, and the secret itself never goes over the line. Each answer proves
to be one to this very question, so nobody without the secret can put bytes in their place. What they are worth is told
by the checksums of the store's index alone. `docs/format.md` gives every byte.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from arrow_schemas.blocks import BLOCK_BYTES, PIECE_BYTES
from arrow_schemas.checksum import readable, refuse_newer
from arrow_schemas.errors import CorruptFileError, UsageError
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.standby import BucketKey

__all__ = [
    "ANSWER_BYTES_MAX",
    "BUSY",
    "GIVEN",
    "GONE",
    "NONCE_BYTES",
    "PEER_FORMAT",
    "PIECES_ACTION",
    "QUESTION_BYTES_MAX",
    "PeerAnswer",
    "PeerQuestion",
    "PeerSecret",
    "in_questions",
]

PEER_FORMAT = 1
PIECES_ACTION = "spark_state_ext.pieces"
# Of one question: its own bytes, its ranges, pieces of a range, and bytes of all answers to it.
QUESTION_BYTES_MAX = 128 << 10
RANGES_MAX = 1024
RANGE_PIECES_MAX = BLOCK_BYTES // PIECE_BYTES
ANSWER_BYTES_MAX = 16 << 20
NONCE_BYTES = 16
# The peer does not have that snapshot (any more); it has too much to do.
GIVEN, GONE, BUSY = range(3)
_STATUSES = frozenset({GIVEN, GONE, BUSY})
_PROOF_BYTES = 16
_SECRET_CHARACTERS_MIN = 16
_DIGEST = re.compile(r"[0-9a-f]{32}")
_ORDER = struct.Struct("<IB")


@dataclass(frozen=True)
class PeerSecret:
    """What those that give and those that ask have in common. No text that is made of one shows it.

    Parameters
    ----------
    key
        32 bytes.
    """

    key: bytes = field(repr=False)

    @staticmethod
    def of(text: str) -> PeerSecret:
        """That of a text, without white space around it."""
        stripped = text.strip()
        if len(stripped) < _SECRET_CHARACTERS_MIN:
            raise UsageError(
                f"the secret of peers has {len(stripped)} characters: take at least {_SECRET_CHARACTERS_MIN}, such as "
                "those of `openssl rand -hex 32`, the same for services and executors"
            )
        return PeerSecret(hashlib.sha256(stripped.encode()).digest())

    def proof(self, what: bytes, *parts: bytes | memoryview) -> bytes:
        """A proof of bytes."""
        digest = hashlib.blake2b(key=self.key, digest_size=_PROOF_BYTES, person=what)
        for part in parts:
            digest.update(part)
        return digest.digest()

    def check(self, proof: bytes | memoryview, what: bytes, *parts: bytes | memoryview) -> None:
        """See that a proof is one, in a time that does not tell how wrong it is."""
        if not hmac.compare_digest(bytes(proof), self.proof(what, *parts)):
            raise CorruptFileError(
                f"{what.decode()} of a peer fails its proof: the two have different secrets, or bytes were changed"
            )


_QUESTION, _ANSWER = b"a question", b"an answer"


@dataclass(frozen=True)
class PeerQuestion:
    """Which pieces of which snapshot.

    Parameters
    ----------
    key
        Of which bucket.
    ref
        Of which checkpoint.
    body_digest
        What the snapshot's footer says of its body: a file of the same name with other bytes is another one.
    ranges
        Numbers of pieces, first and end. The answers come in their order.
    nonce
        Random, so that no answer is one to another question.
    """

    key: BucketKey
    ref: CheckpointRef
    body_digest: str
    ranges: tuple[tuple[int, int], ...]
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))

    def __post_init__(self) -> None:
        operator, query_folder, bucket = self.key
        names = all(isinstance(it, str) and it for it in (operator, query_folder))
        if not names or not _is_count(bucket) or not _is_count(self.ref.version) or not isinstance(self.ref.id, str):
            raise UsageError(f"a peer is asked for a checkpoint of a bucket, not for {self.key!r} at {self.ref!r}")
        if not isinstance(self.body_digest, str) or _DIGEST.fullmatch(self.body_digest) is None:
            raise UsageError(f"a body has a digest of 32 hexadecimal digits, not {self.body_digest!r}")
        if not isinstance(self.nonce, bytes) or len(self.nonce) != NONCE_BYTES:
            raise UsageError(f"a question has a nonce of {NONCE_BYTES} bytes")
        if not 0 < len(self.ranges) <= RANGES_MAX:
            raise UsageError(f"a question has 1 to {RANGES_MAX} ranges, not {len(self.ranges)}")
        if not all(map(_is_range, self.ranges)):
            raise UsageError(f"a range has 1 to {RANGE_PIECES_MAX} pieces, from a first one on")
        if sum(end - first for first, end in self.ranges) * PIECE_BYTES > ANSWER_BYTES_MAX:
            raise UsageError(f"a question is for {ANSWER_BYTES_MAX} bytes at most")

    def encode(self, secret: PeerSecret) -> bytes:
        """The body of the action."""
        fields = {
            "format": PEER_FORMAT,
            "operator": self.key.operator,
            "query_folder": self.key.query_folder,
            "bucket": self.key.bucket,
            "version": self.ref.version,
            "id": self.ref.id,
            "body_digest": self.body_digest,
            "ranges": [list(it) for it in self.ranges],
            "nonce": self.nonce.hex(),
        }
        data = json.dumps(fields).encode()
        return secret.proof(_QUESTION, data) + data

    @staticmethod
    def decode(data: bytes, secret: PeerSecret) -> PeerQuestion:
        """Inverse of `encode`."""
        where = "a question of a peer"
        if not _PROOF_BYTES < len(data) <= QUESTION_BYTES_MAX:
            raise CorruptFileError(f"{where} has {len(data)} bytes")
        text = data[_PROOF_BYTES:]
        secret.check(data[:_PROOF_BYTES], _QUESTION, text)
        try:
            with readable(where, "question"):
                return _question(json.loads(text), where)
        except UsageError as error:
            raise CorruptFileError(f"{where} cannot be right: {error}") from error
        raise AssertionError("unreachable: readable raises what it catches")


def _question(fields: dict[str, Any], where: str) -> PeerQuestion:
    refuse_newer(fields["format"], PEER_FORMAT, where)
    ranges = tuple((first, end) for first, end in fields["ranges"])
    key = BucketKey(fields["operator"], fields["query_folder"], fields["bucket"])
    ref = CheckpointRef(fields["version"], fields["id"])
    return PeerQuestion(key, ref, fields["body_digest"], ranges, bytes.fromhex(fields["nonce"]))


@dataclass(frozen=True)
class PeerAnswer:
    """The pieces of one range, or why there are none.

    Parameters
    ----------
    status
        `GIVEN`, `GONE` or `BUSY`. After one of the last two there is no further answer.
    data
        The bytes of the pieces.
    """

    status: int
    data: bytes | memoryview = b""

    def encode(self, secret: PeerSecret, nonce: bytes, number: int) -> bytes:
        """The body of a result."""
        order = _ORDER.pack(number, self.status)
        return b"".join((secret.proof(_ANSWER, nonce, order, self.data), order[-1:], self.data))

    @staticmethod
    def decode(data: memoryview, secret: PeerSecret, nonce: bytes, number: int) -> PeerAnswer:
        """Inverse of `encode`."""
        if len(data) <= _PROOF_BYTES or data[_PROOF_BYTES] not in _STATUSES:
            raise CorruptFileError(f"an answer of a peer has {len(data)} bytes, and no status")
        answer = PeerAnswer(data[_PROOF_BYTES], data[_PROOF_BYTES + 1 :])
        order = _ORDER.pack(number, answer.status)
        secret.check(data[:_PROOF_BYTES], _ANSWER, nonce, order, answer.data)
        return answer


def in_questions(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ranges of pieces, each of the size that a question may have, as those of one question after the other."""
    some: list[tuple[int, int]] = []
    pieces = 0
    for first, end in ranges:
        if some and (len(some) == RANGES_MAX or (pieces + end - first) * PIECE_BYTES > ANSWER_BYTES_MAX):
            yield tuple(some)
            some, pieces = [], 0
        some.append((first, end))
        pieces += end - first
    if some:
        yield tuple(some)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_range(value: tuple[object, object]) -> bool:
    first, end = value
    if not _is_count(first) or type(end) is not int:
        return False
    assert isinstance(first, int)
    return 0 < end - first <= RANGE_PIECES_MAX
