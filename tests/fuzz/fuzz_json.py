"""Changes of JSON that keep it JSON, which single bytes seldom do: values in the wrong place, of the wrong type or size."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

__all__ = ["changed_json", "changed_pointer"]

_POINTER_HEAD_BYTES = 10
_POINTER_LENGTH_AT = slice(6, 10)
# Text that no value gives: JSON's parsers have limits of their own.
_RAW = {"@digits@": "9" * 5_000, "@deep@": "[" * 12_000, "@exponent@": "1e999", "@surrogate@": '"\\ud800"'}
_NONSENSE: tuple[Any, ...] = (
    *_RAW,
    None,
    True,
    False,
    "",
    "x",
    "٣",
    "0" * 32,
    0,
    1,
    -1,
    2**31,
    2**63,
    -(2**63) - 1,
    0.5,
    float("inf"),
    float("-inf"),
    float("nan"),
    [],
    [[]],
    [1, "0" * 32],
    {},
    {"a": 1},
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each (container, key or index) of a value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def _change(fields: Any, chance: random.Random) -> None:
    places = _places(fields)
    if not places:
        return
    container, key = chance.choice(places)
    other, other_key = chance.choice(places)
    how = chance.randrange(5)
    if how == 0:
        del container[key]
    elif how == 1:  # another value of the same file; a copy, as a value must not hold itself
        container[key] = json.loads(json.dumps(other[other_key]))
    elif how == 2 and isinstance(container, list):
        container.insert(key, json.loads(json.dumps(container[key])))
    elif how == 3 and isinstance(container[key], int):
        container[key] += chance.choice((-1, 1, 2 ** chance.randrange(70)))
    else:
        container[key] = chance.choice(_NONSENSE)


def changed_json(data: bytes, chance: random.Random, mutate: Callable[[bytes], bytes]) -> bytes:
    """Some JSON with a few values changed; what is none is changed by the bytes."""
    if chance.random() < 0.3:
        return mutate(data)
    try:
        fields = json.loads(data)
        for _ in range(chance.randrange(1, 4)):
            _change(fields, chance)
        text = json.dumps(fields)
    except (ValueError, RecursionError):
        return mutate(data)
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def changed_pointer(data: bytes, chance: random.Random, mutate: Callable[[bytes], bytes]) -> bytes:
    """A pointer (without its checksum) whose JSON part is changed, with the right length for it."""
    end = _POINTER_HEAD_BYTES + int.from_bytes(data[_POINTER_LENGTH_AT], "little")
    if end > len(data) or chance.random() < 0.3:
        return mutate(data)
    text = changed_json(data[_POINTER_HEAD_BYTES:end], chance, mutate)
    return data[: _POINTER_LENGTH_AT.start] + len(text).to_bytes(4, "little") + text + data[end:]
