"""What the client of a query sees first: our sentence, and then its own line of code, on classic sessions and Connect.

``python tests/spark/mistakes.py [--connect]`` prints it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mistakes
import pytest
from jobs import SPARK, configured
from mistakes import MISTAKES, OUTPUT, STATE, Mistake, Place, shown, shown_all, state_that_is_no_tuple, without_ids

from tests.helpers.soak import SOAK
from tests.helpers.waiting import WAIT_S, eventually

pytestmark = pytest.mark.spark

# What Spark puts before the sentence, in the same line.
STREAM = r"\[STREAM_FAILED\] Query \[id = …, runId = …\] terminated with exception: "
# In its place in `query.exception()`, on Connect; there is nothing there on classic sessions.
EXCEPTION = r"(\(STREAM_FAILED\) )?"
WORKER = r"\[PYTHON_EXCEPTION\] An exception was thrown from the Python worker: "
# Until 4.2 that has the words of the scheduler in it, and those of the Python worker are others.
OLDER = r"(Job aborted due to stage failure: .*)?(org\.apache\.spark\.api\.python\.PythonException: |\[\w+\] .*)?"
OURS = re.compile(r"/spark_state_ext/|/arrow_schemas/|tenacity|concurrent/futures|threading\.py")


def wrong(mistake: Mistake, text: str, stream: str = STREAM) -> str:
    """What is not as it should be in what is shown of a mistake; empty when all is. `stream` is what Spark says of the
    query."""
    name = "" if mistake.sentence.startswith("\\[") else r"spark_state_ext\.errors\."
    found = re.search(name + mistake.sentence, text)
    if found is None:
        return "the sentence is missing"
    before, after = text[: found.start()], text[found.start() :].split("\n")
    if OURS.search(before):
        return "something of ours stands before it"
    if mistake.client:
        prefix = ""
    elif mistake.sink:
        prefix = stream + r"(?s:.*)"
    else:
        prefix = stream + (WORKER if SPARK >= (4, 3) else OLDER + r"(\n?Traceback \(most recent call last\):\n)?")
    if not re.fullmatch(prefix, before):
        return f"Spark's part is {before!r}"
    if mistake.own and not (
        len(after) > 2 and re.match(r'  File ".*mistakes\.py", line \d+, in ', after[1]) and mistake.own in after[2]
    ):
        return "the user's own line is not next"
    return ""


def test_the_message_comes_first(session: Any, tmp_path: Path) -> None:
    """It came in line 16 to 111, behind frames of tenacity, futures and Spark."""
    classic = "connect" not in type(session).__module__
    # The suite makes every other one, and on Connect every fourth beside those of sinks.
    nth = 2 if classic else 4
    made = [it for at, it in enumerate(MISTAKES) if SOAK or at % nth == 0 or (it.sink and not classic)]
    with configured(session, {"spark.sql.shuffle.partitions": "1"}):
        texts = shown_all(session, tmp_path, made)
    faults = {mistake.name: wrong(mistake, text) for mistake, text in zip(made, texts, strict=True)}
    shown = {mistake.name: "\n".join(text.split("\n")[:4]) for mistake, text in zip(made, texts, strict=True)}
    assert {name: (fault, shown[name]) for name, fault in faults.items() if fault} == {}
    assert len(MISTAKES) >= 20


def test_the_exception_of_a_query_begins_alike(session: Any, tmp_path: Path) -> None:
    """`query.exception()`, which Spark makes in another way than what it raises."""
    (mistake,) = (it for it in MISTAKES if it.name == "update(5)")
    place = Place(session, tmp_path)
    out = place.state().apply_in_pandas_with_state(
        place.input(), "key", state_that_is_no_tuple, OUTPUT, STATE, "update", "NoTimeout"
    )
    query = out.writeStream.format("noop").outputMode("update").start()
    try:
        eventually(lambda: query.exception() is not None)
        assert wrong(mistake, without_ids(str(query.exception())), EXCEPTION) == ""
    finally:
        query.stop()


@pytest.mark.soak
@pytest.mark.parametrize(
    "mode", [[], pytest.param(["--connect"], marks=pytest.mark.connect)], ids=["classic", "connect"]
)
def test_the_command_prints_what_is_told(mode: list[str]) -> None:
    """Over Connect it printed nothing of a failing query, and ended as if all were well."""
    if mode and SPARK < (4, 0):
        pytest.skip("the pip package of PySpark 3.5 holds no Connect server")
    numbers = [at for at, it in enumerate(MISTAKES, 1) if it.name in ("update(5)", "an unknown kind of backend")]
    command = [sys.executable, str(mistakes.__file__), *mode, "--only", *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split("\n\n")
    for number, text in zip(numbers, told, strict=False):
        mistake = MISTAKES[number - 1]
        assert text.startswith(f"{number}. {mistake.name}\n    ")
        assert re.search(mistake.sentence, text)


def test_a_mistake_that_says_nothing_is_shown_by_its_type(tmp_path: Path) -> None:
    def silent(place: Place) -> None:
        raise AssertionError

    assert shown(Mistake("a silent one", silent, ""), Place(None, tmp_path)) == "AssertionError()"
