"""What a worker keeps between calls."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from arrow_schemas import RowSchema
from spark_state_ext.spark import runtime
from spark_state_ext.store import LocalStore

SCHEMA = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))


def test_only_the_stores_used_last_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_OPEN_STORES_MAX", 2)
    monkeypatch.setattr(runtime, "_stores", {})

    def opened(name: str) -> LocalStore:
        return runtime._store(str(tmp_path / name), SCHEMA)

    first, second = opened("a"), opened("b")
    assert opened("a") is first
    assert opened("c") is not second
    assert list(runtime._stores) == [str(tmp_path / "a"), str(tmp_path / "c")]
    # Closed and opened again, it works.
    assert opened("b") is not second
    assert opened("b").runs() == []
