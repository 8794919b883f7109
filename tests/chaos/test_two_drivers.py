"""Two live drivers on one state, until there is something to see; `two_drivers.py` runs it for ten minutes on every kind of store."""

from __future__ import annotations

from pathlib import Path

import pytest
import two_drivers

from spark_state_ext.worker.threads import map_in_parallel

COMMITS = 50
# Renewed after a third of it: what is left is more than any machine is held up for.
LEASE_MS = 30_000


@pytest.mark.slow
def test_exactly_one_ever_commits(tmp_path: Path) -> None:
    """On each kind of store side by side, as they mostly wait."""

    def run(kind: str) -> dict[str, int]:
        options = {} if kind == "path" else {"implementation": f"shares.{kind}"}
        return two_drivers.run(str(tmp_path / kind), options, 0.0, LEASE_MS, COMMITS)

    for counted in map_in_parallel("test", 3, run, ["path", "Share", "ByNameNode"]):
        assert counted["commits"] >= COMMITS
        assert counted["refusals"] > 0
