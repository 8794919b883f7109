"""No outcome of a test depends on how fast the machine is: what is waited for may take minutes (`tests.helpers.waiting`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
FOLDERS = (TESTS, TESTS.parent / "spark_state_ext" / "testing")
SHORT_S = 60
WAITS = ("acquire", "awaitTermination", "communicate", "join", "poll", "result", "run", "wait")
# Where nothing is to happen within that time, or what is polled waits a little: load makes these tests slower, or true.
SHORT = {
    "adapter/test_housekeeping.py: acquire": "one request is enough, as long as it hangs",
    "cluster/random_failover.py: wait": "asked again and again",
    "core/test_background.py: wait": "asked again and again",
}


def _limit(node: ast.AST) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    return None


def _limits(module: ast.Module) -> Iterator[tuple[str, float]]:
    """Times, as numbers, after which something is given up or found to have taken too long."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            if ast.unparse(node.func.value).endswith("path"):
                continue  # `os.path.join`
            given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "timeout")]
            yield from ((node.func.attr, limit) for it in given if (limit := _limit(it)) is not None)
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], (ast.Lt, ast.LtE))
            and "monotonic" in ast.dump(node.left)
        ):
            limit = _limit(node.comparators[0])
            if limit is not None:
                yield "monotonic", limit


def test_no_test_has_a_time_limit_below_a_minute() -> None:
    short = {
        f"{path.relative_to(folder)}: {what}"
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        for what, limit in _limits(ast.parse(path.read_text()))
        if 0 < limit < SHORT_S
    }
    assert short == {*SHORT}
