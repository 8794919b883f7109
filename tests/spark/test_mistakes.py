"""The client of a query sees our sentence first and then its own line of code, on classic sessions and on Connect.

``python tests/spark/mistakes.py [--connect]`` prints these messages.
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
from mistakes import (
    MISTAKES,
    OUTPUT,
    STATE,
    Mistake,
    Place,
    message_of,
    messages_of,
    state_that_is_not_a_tuple,
    without_ids,
)

from tests.helpers.soak import SOAK
from tests.helpers.waiting import WAIT_S, eventually

pytestmark = pytest.mark.spark

# Spark puts these before the sentence, in the same line.
STREAM = r"\[STREAM_FAILED\] Query \[id = …, runId = …\] terminated with exception: "
# `query.exception()` has this instead on Connect, and no prefix on classic sessions.
EXCEPTION = r"(\(STREAM_FAILED\) )?"
WORKER = r"\[PYTHON_EXCEPTION\] An exception was thrown from the Python worker: "
# Up to 4.2 the prefix has words of the scheduler, and other words of the Python worker.
OLDER = r"(Job aborted due to stage failure: .*)?(org\.apache\.spark\.api\.python\.PythonException: |\[\w+\] .*)?"
OURS = re.compile(r"/spark_state_ext/|/arrow_schemas/|tenacity|concurrent/futures|threading\.py")


def find_fault(mistake: Mistake, text: str, stream: str = STREAM) -> str:
    """Return what is wrong with the message of a mistake; empty if it is right. `stream` is Spark's text about the query."""
    name = "" if mistake.sentence.startswith("\\[") else r"spark_state_ext\.errors\."
    sentence = re.search(name + mistake.sentence, text)
    if sentence is None:
        return "the sentence is missing"
    before, after = text[: sentence.start()], text[sentence.start() :].split("\n")
    if OURS.search(before):
        return "text of this package comes before it"
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


def test_our_sentence_comes_first_in_each_error_message(session: Any, tmp_path: Path) -> None:
    """It once came in line 16 to 111, behind frames of tenacity, futures and Spark."""
    classic = "connect" not in type(session).__module__
    # The suite makes every second mistake; on Connect every fourth, and all of sinks.
    nth = 2 if classic else 4
    mistakes_made = [
        mistake for at, mistake in enumerate(MISTAKES) if SOAK or at % nth == 0 or (mistake.sink and not classic)
    ]
    with configured(session, {"spark.sql.shuffle.partitions": "1"}):
        texts = messages_of(session, tmp_path, mistakes_made)
    faults = {mistake.name: find_fault(mistake, text) for mistake, text in zip(mistakes_made, texts, strict=True)}
    openings = {
        mistake.name: "\n".join(text.split("\n")[:4]) for mistake, text in zip(mistakes_made, texts, strict=True)
    }
    assert {name: (fault, openings[name]) for name, fault in faults.items() if fault} == {}
    assert len(MISTAKES) >= 20


def test_our_sentence_comes_first_in_query_exception(session: Any, tmp_path: Path) -> None:
    """Spark builds `query.exception()` in another way than the error that it raises."""
    (mistake,) = (mistake for mistake in MISTAKES if mistake.name == "update(5)")
    place = Place(session, tmp_path)
    out = place.state().apply_in_pandas_with_state(
        place.input(), "key", state_that_is_not_a_tuple, OUTPUT, STATE, "update", "NoTimeout"
    )
    query = out.writeStream.format("noop").outputMode("update").start()
    try:
        eventually(lambda: query.exception() is not None)
        assert find_fault(mistake, without_ids(str(query.exception())), EXCEPTION) == ""
    finally:
        query.stop()


@pytest.mark.soak
@pytest.mark.parametrize(
    "mode", [[], pytest.param(["--connect"], marks=pytest.mark.connect)], ids=["classic", "connect"]
)
def test_the_script_prints_the_error_messages(mode: list[str]) -> None:
    """Over Connect it once printed no message of a failing query, and exited with 0."""
    if mode and SPARK < (4, 0):
        pytest.skip("the pip package of PySpark 3.5 holds no Connect server")
    numbers = [
        number
        for number, mistake in enumerate(MISTAKES, 1)
        if mistake.name in ("update(5)", "an unknown kind of backend")
    ]
    command = [sys.executable, str(mistakes.__file__), *mode, "--only", *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    messages = done.stdout.split("\n\n")
    for number, text in zip(numbers, messages, strict=False):
        mistake = MISTAKES[number - 1]
        assert text.startswith(f"{number}. {mistake.name}\n    ")
        assert re.search(mistake.sentence, text)


def test_an_error_without_text_is_reported_by_its_class(tmp_path: Path) -> None:
    def silent(place: Place) -> None:
        raise AssertionError

    assert message_of(Mistake("a silent one", silent, ""), Place(None, tmp_path)) == "AssertionError()"
