"""What the benchmarks of savepoints measure with."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from benchmarks.savepoint import told_apart


def test_a_link_and_a_copy_are_told_apart(tmp_path: Path) -> None:
    job, savepoint = tmp_path / "job" / "0", tmp_path / "savepoint" / "operator" / "0"
    for folder in (job, savepoint):
        folder.mkdir(parents=True)
    for name, text in (("1_a.snapshot.arrow", "123"), ("2_b.delta.arrow", "4567")):
        (job / name).write_text(text)
    os.link(job / "1_a.snapshot.arrow", savepoint / "1_a.snapshot.arrow")
    shutil.copy(job / "2_b.delta.arrow", savepoint / "2_b.delta.arrow")
    # The manifest is no checkpoint file.
    (tmp_path / "savepoint" / "savepoint.arrow").write_text("8")
    linked, copied = told_apart(tmp_path / "savepoint", tmp_path / "job")
    assert linked == {str(savepoint / "1_a.snapshot.arrow"): 3}
    assert copied == {str(savepoint / "2_b.delta.arrow"): 4}
