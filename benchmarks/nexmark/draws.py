"""Random numbers and strings for Nexmark's events: each draw depends only on the seed, the event and the field."""

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

_LENGTH_MIN = 3
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
# The number of places that each event has in the sequence of hashes: one for each field.
_FIELDS = 64


class Draws:
    """Random numbers for some events; each field of each event has its own place in a SplitMix64 sequence.

    Parameters
    ----------
    seed
        The seed, which determines the sequence together with `stream`.
    stream
        A number that gives one seed several independent sequences.
    numbers
        The numbers of the events.
    """

    def __init__(self, seed: int, stream: int, numbers: I64) -> None:
        # Hash the seed, so that the sequences of adjacent seeds begin far from each other.
        self._key = sum(_mix(np.array([seed, ~stream & _MASK], np.uint64)).tolist())
        self._places = numbers.astype(np.uint64) * np.uint64(_FIELDS * _GOLDEN & _MASK)

    def __len__(self) -> int:
        return len(self._places)

    def bits(self, field: int) -> _U64:
        """Return 64 random bits for each event."""
        return _mix(self._places + np.uint64((self._key + field * _GOLDEN) & _MASK))

    def below(self, field: int, limit: int | I64) -> I64:
        """Return a random integer from 0 to ``limit - 1`` for each event, or 0 if the limit is 0.

        Limits must be below 2**31.
        """
        bits = self.bits(field)
        bits >>= np.uint64(32)
        bits *= np.uint64(limit) if isinstance(limit, int) else limit.astype(np.uint64)
        bits >>= np.uint64(32)
        return bits.view(np.int64)

    def fraction(self, field: int) -> npt.NDArray[np.float64]:
        """Return a random number from [0, 1) for each event."""
        return (self.bits(field) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def price(self, field: int) -> I64:
        """Return a price for each event, in cents from 100 to 100,000,000, whose logarithm is uniform."""
        # Processors may compute the last bit of a power differently. Rarely, a price then differs by one cent.
        price = np.power(10.0, self.fraction(field) * 6.0)
        price *= 100.0
        price += 0.5
        return np.floor(price, out=price).astype(np.int64)

    def text(self, field: int, most: int, special: str = " ") -> tuple[U8, I64]:
        """Return a random string for each event: lower-case letters, and now and then a special character.

        Parameters
        ----------
        field
            The first field to use: a string uses ``1 + ceil((most - 1) / 4)`` fields.
        most
            One more than the maximum length: strings have from 3 to ``most - 1`` characters.
        special
            The special character, which on average is every thirteenth character.

        Returns
        -------
        tuple of array
            The characters, uint8 of shape (events, ``most - 1``), and the lengths of the strings, int64 of shape
            (events,). Characters beyond a string's length do not belong to it.
        """
        words = -(-(most - 1) // 4)
        bits = np.empty((len(self), words), "<u8")
        for i in range(words):
            bits[:, i] = self.bits(field + 1 + i)
        letters = _make_letters(special)[bits.view("<u2")]
        return letters[:, : most - 1], _LENGTH_MIN + self.below(field, most - _LENGTH_MIN)


def _mix(z: _U64) -> _U64:
    """Replace numbers by their SplitMix64 hashes, in place, and return them."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


@functools.cache
def _make_letters(special: str) -> U8:
    """Return a table with a character for each 16-bit number: 1/13 of them are special, 12/13 are letters."""
    cases = np.frombuffer((special * 26 + "abcdefghijklmnopqrstuvwxyz" * 12).encode(), np.uint8)
    table: U8 = cases[np.arange(2**16) * len(cases) >> 16]
    return table


def strings(characters: U8, lengths: I64) -> Any:
    """Return Arrow strings: the beginning of each row of a matrix of ASCII characters, as long as `lengths` says."""
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
