"""That the cluster tests can fail: results that are not those of the batch computation, and orders that nobody followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cluster_work as work
import pytest
from cluster_trial import CASES, SHARES, SHORT, Seen, long_orders

FILES = 8


def rows_of(outputs: work.Outputs) -> list[list[list[Any]]]:
    """What a sink would write of them, a list a batch."""
    batches = [[["total", key, at, *it, 0, 0] for key, it in keys.items()] for at, keys in outputs.totals.items()]
    return [*batches, [["session", key, -1, n, 0, first, last] for key, first, last, n in outputs.sessions]]


def compared(folder: Path, batches: list[list[list[Any]]], should: work.Outputs) -> list[str]:
    folder.mkdir()
    for number, rows in enumerate(batches):
        (folder / f"{number:06}.json").write_text(json.dumps(rows))
    found = work.emitted(folder)
    return [*found.repeated, *work.differences(should, found)]


def test_the_batch_computation_has_sessions_that_end_early_and_late() -> None:
    made = work.tables(FILES, 1)
    should = work.expected(made)
    rows = sum(table.num_rows for table in made)
    assert sum(n * count for (_, _, _, n), count in should.sessions.items()) == rows - 1
    assert len({key for key, *_ in should.sessions}) < should.sessions.total()
    assert [it.to_pylist() for it in work.tables(FILES, 1)] == [it.to_pylist() for it in made]


def test_each_difference_is_found(tmp_path: Path) -> None:
    should = work.expected(work.tables(FILES, 1))
    assert compared(tmp_path / "equal", rows_of(should), should) == []
    for number, (batch, changed) in enumerate(((0, 3), (0, 4), (-1, 3), (-1, 5))):
        batches = rows_of(should)
        batches[batch][0][changed] += 1
        assert compared(tmp_path / f"changed-{number}", batches, should), "a wrong value"
    for number, batch in enumerate((0, FILES - 1, -1)):
        batches = rows_of(should)
        lost = batches[batch].pop()
        assert compared(tmp_path / f"lost-{number}", batches, should), "a lost row"
        batches[batch] += [lost, lost]
        assert compared(tmp_path / f"doubled-{number}", batches, should), "a doubled row"


@pytest.mark.parametrize("orders", [SHORT, *SHARES.values(), long_orders(1)])
def test_what_was_ordered_and_not_seen_is_told(orders: dict[int, str]) -> None:
    kinds = list(orders.values())
    kills = sum(kind.startswith("kill") for kind in kinds)
    seen = Seen(
        kills, 1, 3, kinds.count("restart"), sum("disk" in it for it in kinds), kinds.count("slow"), 1, 1, 1, 9, 9, 9
    )
    assert seen.missing(orders) == []
    assert len(Seen().missing(orders)) >= 6
    seen.executors_killed -= 1
    assert seen.missing(orders) == [f"executors_killed is {kills - 1}, expected {kills} or more"]


def test_the_cases_share_out_everything() -> None:
    assert {case.name for case in CASES} == SHARES.keys()
    assert {order for orders in SHARES.values() for order in orders.values()} == set(SHORT.values())
