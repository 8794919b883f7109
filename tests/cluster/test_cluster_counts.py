"""The cluster tests detect outputs that differ from the batch computation, and orders that were not followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cluster_work as work
import pytest
from cluster_trial import CASES, SHARES, SHORT, Outcome, make_long_orders

FILES = 8


def make_batches(outputs: work.Outputs) -> list[list[list[Any]]]:
    """Return the rows that a sink would write for these outputs, one list for each batch."""
    batches = [
        [["total", key, at, *totals, 0, 0] for key, totals in keys.items()] for at, keys in outputs.totals.items()
    ]
    return [*batches, [["session", key, -1, n, 0, first, last] for key, first, last, n in outputs.sessions]]


def compare_batches(folder: Path, batches: list[list[list[Any]]], expected: work.Outputs) -> list[str]:
    folder.mkdir()
    for number, rows in enumerate(batches):
        (folder / f"{number:06}.json").write_text(json.dumps(rows))
    actual = work.read_output(folder)
    return [*actual.repeated, *work.find_differences(expected, actual)]


def test_the_batch_computation_has_every_row_in_one_session() -> None:
    tables = work.make_tables(FILES, 1)
    expected = work.compute_output(tables)
    rows = sum(table.num_rows for table in tables)
    assert sum(n * count for (_, _, _, n), count in expected.sessions.items()) == rows - 1
    assert len({key for key, *_ in expected.sessions}) < expected.sessions.total()
    assert [table.to_pylist() for table in work.make_tables(FILES, 1)] == [table.to_pylist() for table in tables]


def test_wrong_lost_and_repeated_rows_are_found(tmp_path: Path) -> None:
    expected = work.compute_output(work.make_tables(FILES, 1))
    assert compare_batches(tmp_path / "equal", make_batches(expected), expected) == []
    for number, (batch, changed) in enumerate(((0, 3), (0, 4), (-1, 3), (-1, 5))):
        batches = make_batches(expected)
        batches[batch][0][changed] += 1
        assert compare_batches(tmp_path / f"changed-{number}", batches, expected), "a wrong value"
    for number, batch in enumerate((0, FILES - 1, -1)):
        batches = make_batches(expected)
        lost = batches[batch].pop()
        assert compare_batches(tmp_path / f"lost-{number}", batches, expected), "a lost row"
        batches[batch] += [lost, lost]
        assert compare_batches(tmp_path / f"doubled-{number}", batches, expected), "a doubled row"


@pytest.mark.parametrize("orders", [SHORT, *SHARES.values(), make_long_orders(1)])
def test_missing_lists_ordered_events_that_did_not_happen(orders: dict[int, str]) -> None:
    kinds = list(orders.values())
    kills = sum(kind.startswith("kill") for kind in kinds)
    outcome = Outcome(
        kills,
        1,
        3,
        kinds.count("restart"),
        sum("disk" in kind for kind in kinds),
        kinds.count("slow"),
        1,
        1,
        1,
        9,
        9,
        9,
    )
    assert outcome.missing(orders) == []
    assert len(Outcome().missing(orders)) >= 6
    outcome.executors_killed -= 1
    assert outcome.missing(orders) == [f"executors_killed is {kills - 1}, expected {kills} or more"]


def test_the_orders_of_all_cases_together_are_the_short_orders() -> None:
    assert {case.name for case in CASES} == SHARES.keys()
    assert {order for orders in SHARES.values() for order in orders.values()} == set(SHORT.values())
