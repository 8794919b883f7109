"""The figures in the documents equal those of the committed result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.figures import DOCUMENTS, with_figures


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_figures_in_documents_equal_those_of_the_result_files(path: Path) -> None:
    text = path.read_text()
    assert "<!-- figures" in text
    assert with_figures(text) == text, "run python -m benchmarks.figures"
