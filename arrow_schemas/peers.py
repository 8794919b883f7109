"""Questions to peers for pieces of a snapshot, and their answers: the bodies of Arrow Flight actions.

A question is a proof and a JSON document; an answer is a proof, a status and the bytes of some pieces. A proof is a
keyed BLAKE2b: making one needs the secret, which itself is never sent. The proof of an answer also covers its question,
so bytes cannot be replaced without the secret. Whether the bytes are right is checked only with the checksums in the
store's index. `docs/format.md` gives every byte.
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
from arrow_schemas.checksum import refuse_newer, report_damage
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
    "split_into_questions",
]

PEER_FORMAT = 1
PIECES_ACTION = "spark_state_ext.pieces"
# Limits of one question: its own bytes, its ranges, the pieces of a range, and the bytes of all its answers.
QUESTION_BYTES_MAX = 128 << 10
RANGES_MAX = 1024
RANGE_PIECES_MAX = BLOCK_BYTES // PIECE_BYTES
ANSWER_BYTES_MAX = 16 << 20
NONCE_BYTES = 16
# Statuses: the answer has the pieces; the peer does not have the snapshot, or no longer; the peer is too busy.
GIVEN, GONE, BUSY = range(3)
_STATUSES = frozenset({GIVEN, GONE, BUSY})
_PROOF_BYTES = 16
_SECRET_CHARACTERS_MIN = 16
_DIGEST = re.compile(r"[0-9a-f]{32}")
_ORDER = struct.Struct("<IB")


@dataclass(frozen=True)
class PeerSecret:
    """The secret that peers and the processes that ask them share. Its `repr` does not show it.

    Parameters
    ----------
    key
        32 bytes.
    """

    key: bytes = field(repr=False)

    @staticmethod
    def of(text: str) -> PeerSecret:
        """Return the secret for a text; white space around the text is ignored."""
        stripped = text.strip()
        if len(stripped) < _SECRET_CHARACTERS_MIN:
            raise UsageError(
                f"the secret of peers has {len(stripped)} characters: take at least {_SECRET_CHARACTERS_MIN}, such as "
                "the output of `openssl rand -hex 32`, and use the same secret for services and executors"
            )
        return PeerSecret(hashlib.sha256(stripped.encode()).digest())

    def proof(self, what: bytes, *parts: bytes | memoryview) -> bytes:
        """Return the proof of some bytes."""
        digest = hashlib.blake2b(key=self.key, digest_size=_PROOF_BYTES, person=what)
        for part in parts:
            digest.update(part)
        return digest.digest()

    def check(self, proof: bytes | memoryview, what: bytes, *parts: bytes | memoryview) -> None:
        """Raise `CorruptFileError` unless a proof is right; the time this takes does not reveal how wrong it is."""
        if not hmac.compare_digest(bytes(proof), self.proof(what, *parts)):
            raise CorruptFileError(
                f"{what.decode()} of a peer fails its proof: both sides have different secrets, or bytes were changed"
            )


_QUESTION, _ANSWER = b"a question", b"an answer"


@dataclass(frozen=True)
class PeerQuestion:
    """A question for some pieces of one snapshot.

    Parameters
    ----------
    key
        The snapshot's bucket.
    ref
        The snapshot's checkpoint.
    body_digest
        The digest of the body in the snapshot's footer: a file of the same name with other bytes is another snapshot.
    ranges
        Ranges of piece numbers: first and end, which is exclusive. Answers come in the same order.
    nonce
        Random bytes, so that an answer cannot be used for another question.
    """

    key: BucketKey
    ref: CheckpointRef
    body_digest: str
    ranges: tuple[tuple[int, int], ...]
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))

    def __post_init__(self) -> None:
        operator, query_folder, bucket = self.key
        names = all(isinstance(name, str) and name for name in (operator, query_folder))
        if not names or not _is_count(bucket) or not _is_count(self.ref.version) or not isinstance(self.ref.id, str):
            raise UsageError(f"a question must name a bucket and a checkpoint, not {self.key!r} and {self.ref!r}")
        if not isinstance(self.body_digest, str) or _DIGEST.fullmatch(self.body_digest) is None:
            raise UsageError(f"the body digest of a question must be 32 hexadecimal digits, not {self.body_digest!r}")
        if not isinstance(self.nonce, bytes) or len(self.nonce) != NONCE_BYTES:
            raise UsageError(f"the nonce of a question must be {NONCE_BYTES} bytes")
        if not 0 < len(self.ranges) <= RANGES_MAX:
            raise UsageError(f"a question must have 1 to {RANGES_MAX} ranges, not {len(self.ranges)}")
        if not all(map(_is_range, self.ranges)):
            raise UsageError(
                f"each range of a question must be a first number and an end, of 1 to {RANGE_PIECES_MAX} pieces"
            )
        if sum(end - first for first, end in self.ranges) * PIECE_BYTES > ANSWER_BYTES_MAX:
            raise UsageError(f"a question must ask for at most {ANSWER_BYTES_MAX} bytes")

    def encode(self, secret: PeerSecret) -> bytes:
        """Return the body of the action."""
        fields = {
            "format": PEER_FORMAT,
            "operator": self.key.operator,
            "query_folder": self.key.query_folder,
            "bucket": self.key.bucket,
            "version": self.ref.version,
            "id": self.ref.id,
            "body_digest": self.body_digest,
            "ranges": [list(bounds) for bounds in self.ranges],
            "nonce": self.nonce.hex(),
        }
        data = json.dumps(fields).encode()
        return secret.proof(_QUESTION, data) + data

    @staticmethod
    def decode(data: bytes, secret: PeerSecret) -> PeerQuestion:
        """Check and decode a question."""
        where = "a question of a peer"
        if not _PROOF_BYTES < len(data) <= QUESTION_BYTES_MAX:
            raise CorruptFileError(f"{where} has {len(data)} bytes, which is too few or too many")
        text = data[_PROOF_BYTES:]
        secret.check(data[:_PROOF_BYTES], _QUESTION, text)
        try:
            with report_damage(where, "question"):
                return _decode_question(json.loads(text), where)
        except UsageError as error:
            raise CorruptFileError(f"{where} is not valid: {error}") from error
        raise AssertionError("unreachable: readable raises what it catches")


def _decode_question(fields: dict[str, Any], where: str) -> PeerQuestion:
    refuse_newer(fields["format"], PEER_FORMAT, where)
    ranges = tuple((first, end) for first, end in fields["ranges"])
    key = BucketKey(fields["operator"], fields["query_folder"], fields["bucket"])
    ref = CheckpointRef(fields["version"], fields["id"])
    return PeerQuestion(key, ref, fields["body_digest"], ranges, bytes.fromhex(fields["nonce"]))


@dataclass(frozen=True)
class PeerAnswer:
    """The pieces of one range, or the reason why the peer does not give them.

    Parameters
    ----------
    status
        `GIVEN`, `GONE` or `BUSY`. `GONE` and `BUSY` end the answers.
    data
        The bytes of the pieces.
    """

    status: int
    data: bytes | memoryview = b""

    def encode(self, secret: PeerSecret, nonce: bytes, number: int) -> bytes:
        """Return the body of a result."""
        order = _ORDER.pack(number, self.status)
        return b"".join((secret.proof(_ANSWER, nonce, order, self.data), order[-1:], self.data))

    @staticmethod
    def decode(data: memoryview, secret: PeerSecret, nonce: bytes, number: int) -> PeerAnswer:
        """Check and decode the answer that must have the given nonce and number."""
        if len(data) <= _PROOF_BYTES or data[_PROOF_BYTES] not in _STATUSES:
            raise CorruptFileError(f"an answer of a peer has {len(data)} bytes and no valid status")
        answer = PeerAnswer(data[_PROOF_BYTES], data[_PROOF_BYTES + 1 :])
        order = _ORDER.pack(number, answer.status)
        secret.check(data[:_PROOF_BYTES], _ANSWER, nonce, order, answer.data)
        return answer


def split_into_questions(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the ranges of one question after the other; each of `ranges` must fit into a question."""
    batch: list[tuple[int, int]] = []
    pieces = 0
    for first, end in ranges:
        if batch and (len(batch) == RANGES_MAX or (pieces + end - first) * PIECE_BYTES > ANSWER_BYTES_MAX):
            yield tuple(batch)
            batch, pieces = [], 0
        batch.append((first, end))
        pieces += end - first
    if batch:
        yield tuple(batch)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_range(value: tuple[object, object]) -> bool:
    first, end = value
    if not _is_count(first) or type(end) is not int:
        return False
    assert isinstance(first, int)
    return 0 < end - first <= RANGE_PIECES_MAX
