"""Two live drivers on one state, for a few seconds; `two_drivers.py` runs it for ten minutes on every kind of store."""

from __future__ import annotations

from pathlib import Path

import pytest
import two_drivers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["path", "Share", "ByNameNode"])
def test_exactly_one_ever_commits(kind: str, tmp_path: Path) -> None:
    options = {} if kind == "path" else {"implementation": f"shares.{kind}"}
    counted = two_drivers.run(str(tmp_path / "root"), options, 8.0, 4_000)
    assert counted["commits"] > 0
    assert counted["refusals"] > 0
    assert counted["files_deleted"] >= 0
