"""The structure of the code: imports point down, nothing is long, and what a process has once is not in module globals."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("arrow_schemas", "spark_state_ext")


def _modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def test_imports_point_down() -> None:
    """The contracts in setup.cfg: no arrow upwards, no circle, no PySpark and no pandas in the core."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_says_what_it_holds() -> None:
    folders = {path.parent for path, _ in _modules()}
    silent = [
        str(folder)
        for folder in folders
        if not ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    ]
    assert not silent


def test_no_module_has_more_than_500_lines() -> None:
    long = {str(path): lines for path, _ in _modules() if (lines := len((ROOT / path).read_text().splitlines())) > 500}
    assert not long
