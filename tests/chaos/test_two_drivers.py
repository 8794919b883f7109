"""Two live drivers on one state, for a number of commits; the script `two_drivers.py` runs for minutes on more stores."""

from __future__ import annotations

from pathlib import Path

import pytest
import two_drivers

from spark_state_ext.worker.threads import map_in_parallel

COMMITS = 50
# A lease is renewed after a third of this time; the rest is longer than any machine's pause.
LEASE_MS = 30_000


@pytest.mark.slow
def test_exactly_one_of_two_drivers_commits(tmp_path: Path) -> None:
    """The kinds of stores run at the same time because the drivers mostly wait."""

    def run(kind: str) -> dict[str, int]:
        options = {} if kind == "path" else {"implementation": f"shares.{kind}"}
        return two_drivers.run(str(tmp_path / kind), options, 0.0, LEASE_MS, COMMITS)

    for counts in map_in_parallel("test", 3, run, ["path", "Share", "ByNameNode"]):
        assert counts["commits"] >= COMMITS
        assert counts["refusals"] > 0
