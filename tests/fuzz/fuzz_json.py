"""Changes of JSON that keep it valid, unlike most changes of bytes: values in a wrong place, of a wrong type or size."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

__all__ = ["change_json", "change_pointer"]

_POINTER_HEAD_BYTES = 10
_POINTER_LENGTH_AT = slice(6, 10)
# Text that `json.dumps` never writes, to reach the limits of JSON parsers.
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


def find_places(value: Any) -> list[tuple[Any, Any]]:
    """Return the (container, key or index) of each value within a value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *find_places(value[key]))]


def change_value(fields: Any, chance: random.Random) -> None:
    places = find_places(fields)
    if not places:
        return
    container, key = chance.choice(places)
    other, other_key = chance.choice(places)
    kind = chance.randrange(5)
    if kind == 0:
        del container[key]
    elif kind == 1:  # a copy of another value of the file, because a value must not contain itself
        container[key] = json.loads(json.dumps(other[other_key]))
    elif kind == 2 and isinstance(container, list):
        container.insert(key, json.loads(json.dumps(container[key])))
    elif kind == 3 and isinstance(container[key], int):
        container[key] += chance.choice((-1, 1, 2 ** chance.randrange(70)))
    else:
        container[key] = chance.choice(_NONSENSE)


def change_json(data: bytes, chance: random.Random, mutate: Callable[[bytes], bytes]) -> bytes:
    """Change a few values of some JSON; change other data by its bytes."""
    if chance.random() < 0.3:
        return mutate(data)
    try:
        fields = json.loads(data)
        for _ in range(chance.randrange(1, 4)):
            change_value(fields, chance)
        text = json.dumps(fields)
    except (ValueError, RecursionError):
        return mutate(data)
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def change_pointer(data: bytes, chance: random.Random, mutate: Callable[[bytes], bytes]) -> bytes:
    """Change the JSON part of a pointer without its checksum, and its length field."""
    end = _POINTER_HEAD_BYTES + int.from_bytes(data[_POINTER_LENGTH_AT], "little")
    if end > len(data) or chance.random() < 0.3:
        return mutate(data)
    text = change_json(data[_POINTER_HEAD_BYTES:end], chance, mutate)
    return data[: _POINTER_LENGTH_AT.start] + len(text).to_bytes(4, "little") + text + data[end:]
