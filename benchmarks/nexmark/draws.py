"""Random numbers and strings of Nexmark's events: a draw depends on seed, event and field, and on nothing else."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Draws", "I64", "U8", "join", "lengths", "one_of", "strings", "text"]

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
_U64 = npt.NDArray[np.uint64]

_LEAST_LENGTH = 3
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
# Places in the sequence of hashes that each event has for itself.
_FIELDS = 64


class Draws:
    """Random numbers of some events: each field of each event has its own place in a SplitMix64 sequence.

    Parameters
    ----------
    seed
        Decides the sequence.
    stream
        Tells sequences of one seed apart.
    numbers
        Event numbers.
    """

    def __init__(self, seed: int, stream: int, numbers: I64) -> None:
        # Hashed, so that seeds next to each other begin at places far from each other.
        self._key = sum(_mix(np.array([seed, ~stream & _MASK], np.uint64)).tolist())
        self._places = numbers.astype(np.uint64) * np.uint64(_FIELDS * _GOLDEN & _MASK)

    def __len__(self) -> int:
        return len(self._places)

    def bits(self, field: int) -> _U64:
        """64 random bits an event."""
        return _mix(self._places + np.uint64((self._key + field * _GOLDEN) & _MASK))

    def below(self, field: int, limit: int | I64) -> I64:
        """Whole numbers from 0 to ``limit - 1``; 0 for a limit of 0. Limits are below 2**31."""
        bits = self.bits(field)
        bits >>= np.uint64(32)
        bits *= np.uint64(limit) if isinstance(limit, int) else limit.astype(np.uint64)
        bits >>= np.uint64(32)
        return bits.view(np.int64)

    def fraction(self, field: int) -> npt.NDArray[np.float64]:
        """Numbers from [0, 1)."""
        return (self.bits(field) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def price(self, field: int) -> I64:
        """Prices in cents, from 100 to 100,000,000: the logarithm is uniform."""
        # Another processor's power may differ in its last bit, and then, rarely, a price by a cent.
        price = np.power(10.0, self.fraction(field) * 6.0)
        price *= 100.0
        price += 0.5
        return np.floor(price, out=price).astype(np.int64)

    def text(self, field: int, most: int, special: str = " ") -> tuple[U8, I64]:
        """Random characters: letters, and now and then a special one.

        Parameters
        ----------
        field
            First of ``1 + ceil((most - 1) / 4)`` fields that are used.
        most
            Strings have from 3 to ``most - 1`` characters.
        special
            Every thirteenth character, on average.

        Returns
        -------
        tuple of array
            Characters, uint8 of shape (events, ``most - 1``), and the lengths of strings, int64 of shape (events,).
        """
        words = -(-(most - 1) // 4)
        bits = np.empty((len(self), words), "<u8")
        for i in range(words):
            bits[:, i] = self.bits(field + 1 + i)
        letters = _letters(special)[bits.view("<u2")]
        return letters[:, : most - 1], _LEAST_LENGTH + self.below(field, most - _LEAST_LENGTH)


def _mix(z: _U64) -> _U64:
    """SplitMix64's hash, in place."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


@functools.cache
def _letters(special: str) -> U8:
    """Character for each of the numbers of 16 bits: a special one, or any letter, with probabilities 1 and 12 in 13."""
    cases = np.frombuffer((special * 26 + "abcdefghijklmnopqrstuvwxyz" * 12).encode(), np.uint8)
    table: U8 = cases[np.arange(2**16) * len(cases) >> 16]
    return table


def strings(characters: U8, lengths: I64) -> Any:
    """Arrow strings from a matrix of ASCII characters, of each of whose rows the first ones count."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    data = characters[np.arange(characters.shape[1]) < lengths[:, np.newaxis]]
    return pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(data))


def text(draws: Draws, field: int, most: int, special: str = " ") -> Any:
    return pc.ascii_trim_whitespace(strings(*draws.text(field, most, special)))


def one_of(choices: Any, draws: Draws, field: int) -> Any:
    return choices.take(pa.array(draws.below(field, len(choices))))


def join(*parts: Any) -> Any:
    return pc.binary_join_element_wise(*parts, "")


def lengths(strings: Any) -> I64:
    lengths: I64 = pc.binary_length(strings).to_numpy().astype(np.int64)
    return lengths
