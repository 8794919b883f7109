"""moto's S3 server, but one that gives a part of an object without reading all of it, as any store does.

``python held_s3.py -H 127.0.0.1 -p PORT``. moto reads an object from its file for each request, so a hundred ranges of a
snapshot would take it a hundred times as long as the whole. Here objects that were read once stay in memory.
"""

from __future__ import annotations

from typing import Any

from moto.s3.models import FakeKey
from moto.server import main

_VALUE: Any = vars(FakeKey)["value"]


def _held(key: FakeKey) -> bytes:
    value: bytes | None = key.__dict__.get("_held")
    if value is None:
        value = key.__dict__["_held"] = _VALUE.fget(key)
    return value


def _hold(key: FakeKey, value: bytes) -> None:
    key.__dict__.pop("_held", None)
    _VALUE.fset(key, value)


if __name__ == "__main__":
    type.__setattr__(FakeKey, "value", property(_held, _hold))
    main()
