"""The code and the documents use the terms of `docs/glossary.md`, and none of the terms that they replaced."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = sorted(path for package in ("arrow_schemas", "spark_state_ext") for path in (ROOT / package).rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
GLOSSARY = ROOT / "docs" / "glossary.md"
# Names that the code no longer uses, and their replacements.
NAMES = {
    "Place": "Replica",
    "sole_place": "sole_replica",
    "Standing": "ReplicationStatus",
    "standing": "status",
    "standings": "replication",
    "beat": "heartbeat",
    "beats": "heartbeats",
    "recent_beats": "recent_heartbeats",
    "home": "query_folder",
    "homes": "query_folders",
    "Looks": "Probes",
    "Note": "UploadRecord",
    "note_name": "record_name",
    "notes_of": "read_upload_records",
    "adopt": "ingest",
    "choose_merge": "choose_compaction",
    "presumed": "unconfirmed",
    "presuming_snapshot": "with_unconfirmed_snapshot",
    "Spread": "Partitioning",
    "timeout_floor_ms": "timer_low_watermark_ms",
    "timeout_floor_version": "timer_low_watermark_version",
    "caught_up": "with_full_snapshot",
}
# Words that the text no longer uses. Keys of formats are in backticks, and keep their names until the format changes.
WORDS = ("beat", "beats", "standing", "standings", "presumed", "homes")
# These modules use "home" in the sense of other projects: for a user's folder and for those of Java and Spark.
_OTHER_HOMES = {"error_border.py", "server.py"}


def list_names(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def read_prose(path: Path) -> str:
    """Return the text of a page without the parts in backticks."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL))


def test_replaced_names_do_not_occur_in_the_code() -> None:
    errors = [
        f"{path.relative_to(ROOT)}:{line}: {name}, use {NAMES[name]}"
        for path in LIBRARY
        for line, name in list_names(path)
        if name in NAMES and not ("home" in name and path.name in _OTHER_HOMES)
    ]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_words_of_the_glossary(page: Path) -> None:
    # The page about the change names both the old and the new terms.
    if page.name == "005-rooms.md":
        return
    words = re.findall(rf"\b(?:{'|'.join(WORDS)})\b", read_prose(page))
    assert not words


def test_the_glossary_has_one_line_for_each_term() -> None:
    terms = [line.split("|")[1].strip() for line in GLOSSARY.read_text().splitlines() if re.match(r"\| \w", line)]
    terms = [term for term in terms if term != "term"]
    assert len(terms) > 30
    assert len(set(terms)) == len(terms)
