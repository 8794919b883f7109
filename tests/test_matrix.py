"""`scripts/matrix.py --write` refuses results with other versions than a corner of the matrix requires."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "scripts"))

import matrix


def make_result(corner: matrix.Corner, **versions: str) -> matrix.Result:
    return matrix.Result(corner, "3.12.1", versions, "17.0.15", "1 passed (1 s)", passed=True)


@pytest.mark.parametrize(
    ("version", "condition", "expected"),
    [
        ("2023.12.2", "==2023.12.2", True),
        ("2023.6.0", "==2023.12.2", False),
        ("3.0.0", "==3", True),
        ("2.10.0", ">=2.9", True),
        ("2.3.3", "<3", True),
        ("3.0.0", "<3", False),
        ("26.0.1.post1", ">=26", True),
    ],
)
def test_holds_compares_versions(version: str, condition: str, expected: bool) -> None:
    assert matrix.holds(version, condition) is expected


def test_all_requirements_can_be_parsed() -> None:
    for corner in matrix.corners():
        for requirement in corner.requirements:
            name, conditions = matrix.parsed(requirement)
            assert name in matrix.PACKAGES
            for condition in conditions:
                matrix.holds("1.0", condition)


def test_contradictions_lists_versions_that_differ_from_the_requirements() -> None:
    corner = matrix.Corner("old", "", ["3.10"], ["pyspark[connect]==3.5.9", "fsspec==2023.12.2", "lmdb>=2,<3"], "", "")
    assert make_result(corner, pyspark="3.5.9", fsspec="2023.12.2", lmdb="2.1").contradictions() == []
    assert make_result(corner, pyspark="3.5.9", fsspec="2023.6.0", lmdb="3.0").contradictions() == [
        "old asks for fsspec==2023.12.2 and ran with fsspec 2023.6.0",
        "old asks for lmdb>=2,<3 and ran with lmdb 3.0",
    ]
    # A corner that could not be set up has no versions.
    assert make_result(corner).contradictions() == []


def test_a_result_with_contradictions_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "matrix.md"
    empty = "".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in ("corners", "results"))
    page.write_text(empty)
    installed = {"3.5": "2023.6.0"}

    def check(corner: matrix.Corner, folder: Path, tests: list[str]) -> matrix.Result:
        return make_result(corner, fsspec=installed.get(corner.name, "2026.9.0"))

    monkeypatch.setattr(matrix, "DOCUMENT", page)
    monkeypatch.setattr(matrix, "check", check)
    monkeypatch.setattr(sys, "argv", ["matrix.py", "--write"])
    with pytest.raises(SystemExit, match=r"3\.5 asks for fsspec==2023\.12\.2 and ran with fsspec 2023\.6\.0"):
        matrix.main()
    assert page.read_text() == empty
    installed["3.5"] = "2023.12.2"
    assert matrix.main() == 0
    assert "2023.12.2" in page.read_text()
