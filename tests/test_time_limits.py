"""The result of a test never depends on the speed of the machine: waits may take minutes (`tests.helpers.waiting`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
FOLDERS = (TESTS, TESTS.parent / "spark_state_ext" / "testing")
SHORT_S = 60
WAITS = ("acquire", "awaitTermination", "communicate", "join", "poll", "result", "run", "wait")
# Waits for the absence of an event, or between polls: a slow machine makes these tests slower but does not fail them.
SHORT = {
    "adapter/test_housekeeping.py: acquire": "no second clean-up starts while one hangs",
    "cluster/random_failover.py: wait": "the wait is repeated",
    "core/test_background.py: wait": "the wait is repeated",
    "core/test_erase_history.py: wait": "the wait is repeated",
}


def read_limit(node: ast.AST) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    return None


def list_limits(module: ast.Module) -> Iterator[tuple[str, float]]:
    """Yield the waiting methods of a module whose time limit is a number, with that number."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            if ast.unparse(node.func.value).endswith("path"):
                continue  # `os.path.join`
            arguments = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "timeout")]
            yield from (
                (node.func.attr, limit) for argument in arguments if (limit := read_limit(argument)) is not None
            )
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], (ast.Lt, ast.LtE))
            and "monotonic" in ast.dump(node.left)
        ):
            limit = read_limit(node.comparators[0])
            if limit is not None:
                yield "monotonic", limit


def test_no_test_has_a_time_limit_below_a_minute() -> None:
    short = {
        f"{path.relative_to(folder)}: {method}"
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        for method, limit in list_limits(ast.parse(path.read_text()))
        if 0 < limit < SHORT_S
    }
    assert short == {*SHORT}
