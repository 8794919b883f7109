"""Two stateful steps on the same keys in one operator, against the same two steps written by hand in pandas."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from spark_state_ext import ArrowState, Step, chain
from spark_state_ext.errors import StateValueError, UsageError
from spark_state_ext.spark.callers.group_state import Clock, KeyState
from spark_state_ext.spark.client import chain as chained
from spark_state_ext.spark.client.chain import Chain
from tests.helpers.waiting import WAIT_S

pytestmark = pytest.mark.spark

RUNNING = StructType([StructField("total", LongType())])
PEAKS = StructType([StructField("key", LongType()), StructField("peak", LongType()), StructField("seen", LongType())])


def running_total(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Adds up; yields the total only when it is even, so that the next step has no rows in some batches."""
    (total,) = state.getOption or (0,)
    total += sum(int(pdf["value"].sum()) for pdf in pdfs)
    state.update((total,))
    if total % 2 == 0:
        yield pd.DataFrame({"total": [total]})


def peaks(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Highest total so far, and how many there were."""
    peak, seen = state.getOption or (-(2**62), 0)
    for pdf in pdfs:
        assert list(pdf.columns) == ["total"]
        peak, seen = max(peak, int(pdf["total"].max())), seen + len(pdf)
    state.update((peak, seen))
    yield pd.DataFrame({"key": [int(key[0])], "peak": [peak], "seen": [seen]})


BATCHES = [[(1, 2), (2, 1)], [(1, -4), (2, 3), (3, 5)], [(1, 1), (2, 2)], [(1, 9), (3, 1)]]


def expected() -> dict[int, tuple[int, int]]:
    totals: dict[int, int] = {}
    result: dict[int, tuple[int, int]] = {}
    for batch in BATCHES:
        for key in sorted({k for k, _ in batch}):
            totals[key] = totals.get(key, 0) + sum(v for k, v in batch if k == key)
            if totals[key] % 2 == 0:
                peak, seen = result.get(key, (-(2**62), 0))
                result[key] = (max(peak, totals[key]), seen + 1)
    return result


def test_each_step_has_its_state_and_the_next_step_its_output(spark: SparkSession, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    state = ArrowState(str(tmp_path / "root"), "chained", buckets=2, local_dir=str(tmp_path / "local"))
    state_type = StructType([StructField("peak", LongType()), StructField("seen", LongType())])
    steps = chain(Step(running_total, RUNNING, RUNNING), Step(peaks, PEAKS, state_type))
    rows: dict[int, tuple[int, int]] = {}
    for at, batch in enumerate(BATCHES):
        table = pa.table({"key": [k for k, _ in batch], "value": [v for _, v in batch]})
        pq.write_table(table, source / f"{at}.parquet")
        os.utime(source / f"{at}.parquet", (1_000_000 + at, 1_000_000 + at))
        # Started anew for each file: state of both steps goes through a restart every time.
        events = spark.readStream.schema("key long, value long").parquet(str(source))
        out = state.apply_in_pandas_with_state(
            events, "key", steps.func, steps.outputStructType, steps.stateStructType, "update", "NoTimeout"
        )
        query = (
            out.writeStream.outputMode("update")
            .foreachBatch(lambda df, _: rows.update({r.key: (r.peak, r.seen) for r in df.collect()}))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(WAIT_S)
    assert rows == expected()


def test_one_step_is_no_chain() -> None:
    with pytest.raises(UsageError, match="at least two"):
        chain(Step(running_total, RUNNING, RUNNING))


def test_a_steps_schemas_may_be_ddl(spark: SparkSession) -> None:
    step = Step(running_total, "total bigint, tags array<string>", "total bigint")
    assert step.outputStructType == StructType([*RUNNING, StructField("tags", ArrayType(StringType()))])
    assert step == Step(running_total, step.outputStructType, RUNNING)


def test_schemas_that_a_step_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="stateStructType of a Step must be a StructType or a DDL string, not 7"):
        Step(running_total, RUNNING, 7)  # type: ignore[arg-type]  # what is refused
    monkeypatch.setattr(chained, "_find_active_session", lambda: None)
    with pytest.raises(
        UsageError, match=r"outputStructType of a Step is the DDL string 'n long', .*create the session"
    ):
        Step(running_total, "n long", RUNNING)


def answers(steps: Chain, key: Any = 1, values: Any = (1, 2)) -> list[pd.DataFrame]:
    """What a chain gives for a key without state that has rows."""
    state = KeyState(None, Clock(1, -1, "NoTimeout", False, False, steps.stateStructType))
    frames = list(steps.func((key,), iter([pd.DataFrame({"value": list(values)})]), state))
    assert all(type(frame) is pd.DataFrame for frame in frames)
    return frames


NAMED = StructType([StructField("name", StringType()), StructField("n", LongType())])
ROWS: list[tuple[Any, ...]] = [("a", 1), ("b", 2**53 + 1)]
FORMS: dict[str, Callable[[], Any]] = {
    "frames": lambda: iter([pd.DataFrame({"n": [1], "name": ["a"]}), pd.DataFrame({0: ["b"], 1: [2**53 + 1]})]),
    "tuples": lambda: iter(ROWS),
    "a list of tuples": lambda: ROWS,
    "lists of tuples": lambda: iter([ROWS[:1], [], ROWS[1:]]),
    "a dict of columns": lambda: {"n": [1, 2**53 + 1], "name": ["a", "b"]},
    "dicts of columns": lambda: iter([{"name": [name], "n": [n]} for name, n in ROWS]),
    "some of each": lambda: iter([ROWS[0], pd.DataFrame(), pd.DataFrame({"name": ["b"], "n": [2**53 + 1]})]),
}


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_may_give_whatever_a_function_may(form: str, place: int) -> None:
    def gives(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        assert sum(map(len, pdfs)) == 2
        state.update((place,))
        return FORMS[form]()

    def passes_on(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        for pdf in pdfs:
            assert list(pdf.columns) in (["value"], ["name", "n"])
            yield pdf if "n" in pdf else pd.DataFrame({"name": ["x", "y"], "n": [0, 0]})

    functions = [gives if at == place else passes_on for at in range(3)]
    frame = pd.concat(answers(chain(*(Step(function, NAMED, RUNNING) for function in functions))))
    assert list(frame.columns) == ["name", "n"]
    assert list(frame.itertuples(index=False, name=None)) == ROWS
    assert frame["n"].dtype == "int64"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("a", 1), r"the function gave 'a' \(str\) for a row: return, or yield, one tuple of name, n"),
        ([("a",)], r"the function gave \('a',\) for a row; expected a tuple of name, n"),
        ({"name": "ab", "n": 1}, r"column 'name' is 'ab' \(str\): a dict holds columns"),
        (None, r"the function returned None: yield rows or frames"),
        (pd.DataFrame({"name": ["a"], "n": [1]}), r"the function returned a DataFrame: yield it, or return \[frame\]"),
    ],
    ids=["one tuple", "a short row", "a dict of values", "None", "a frame"],
)
@pytest.mark.parametrize("place", [0, 1])
def test_what_a_step_cannot_give_is_told_as_without_a_chain(given: Any, text: str, place: int) -> None:
    def good(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        assert len(list(pdfs)) == 1
        return ROWS

    def bad(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        assert len(list(pdfs)) == 1
        return given

    steps = [Step(bad if at == place else good, NAMED, RUNNING) for at in range(2)]
    with pytest.raises(StateValueError, match=text):
        answers(chain(*steps))


@pytest.mark.parametrize("place", [0, 1])
def test_a_frame_with_other_columns_is_told_with_its_step(place: int) -> None:
    def good(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        assert len(list(pdfs)) == 1
        return ROWS

    for given, text in (
        (pd.DataFrame({"Name": ["a"], "n": [1]}), "the columns Name, n"),
        (pd.DataFrame([["a", 1, 2]]), "the columns 3 without names"),
    ):

        def bad(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState, given: pd.DataFrame = given) -> Any:
            assert len(list(pdfs)) == 1
            return [given]

        steps = [Step(bad if at == place else good, NAMED, RUNNING) for at in range(2)]
        with pytest.raises(StateValueError, match=f"step {place} returned a frame with {text}, but .* has name, n"):
            answers(chain(*steps))


def test_a_step_that_leaves_its_input_unread_loses_nothing_of_the_step_before() -> None:
    def counts(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        (n,) = state.getOption or (0,)
        for pdf in pdfs:
            n += len(pdf)
            yield pd.DataFrame({"total": [n]})
        state.update((n,))

    def looks_at_one(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        yield next(iter(pdfs)).assign(key=1, peak=0)[["key", "peak"]].assign(seen=0)

    steps = chain(Step(counts, RUNNING, RUNNING), Step(looks_at_one, PEAKS, PEAKS))
    stored: Any = None
    for expected_n in (3, 6):
        state = KeyState(stored, Clock(1, -1, "NoTimeout", False, False, steps.stateStructType))
        frames = iter([pd.DataFrame({"value": [1]}), pd.DataFrame({"value": [1, 2]})])
        assert len(list(steps.func((1,), frames, state))) == 1
        stored = state.getOption
        assert stored is not None
        assert tuple(stored[0]) == (expected_n,)


def test_a_list_that_a_step_changed_and_did_not_give_back_is_as_it_was() -> None:
    """As without a chain, though the other step's state is stored."""
    kept = StructType([StructField("all", ArrayType(LongType()))])

    def changes(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        if state.exists:
            state.get[0].append(99)
        else:
            state.update(([0],))
        return {"total": [len(list(pdfs))]}

    def counts(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        (n,) = state.getOption or (0,)
        state.update((n + len(list(pdfs)),))
        return []

    steps = chain(Step(changes, RUNNING, kept), Step(counts, RUNNING, RUNNING))
    stored: Any = None
    for batch in (1, 2, 3):
        state = KeyState(stored, Clock(1, -1, "NoTimeout", False, False, steps.stateStructType))
        list(steps.func((1,), iter([pd.DataFrame({"value": [batch]})]), state))
        stored = state.getOption
        assert stored is not None
        assert (stored[0][0], stored[2][0]) == ([0], batch)


def test_a_list_that_a_step_was_given_and_changed_is_a_change() -> None:
    kept = StructType([StructField("all", ArrayType(LongType()))])

    def keeps(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        values = state.get[0] if state.exists else []
        values += [int(value) for pdf in pdfs for value in pdf["value"]]
        state.update((values,))
        return {"total": [len(values)]}

    steps = chain(Step(keeps, RUNNING, kept), Step(keeps_nothing, RUNNING, RUNNING))
    stored: Any = None
    for batch in (1, 2, 3):
        state = KeyState(stored, Clock(1, -1, "NoTimeout", False, False, steps.stateStructType))
        list(steps.func((1,), iter([pd.DataFrame({"value": [batch]})]), state))
        assert state.touched
        stored = state.getOption
    assert list(stored[0][0]) == [1, 2, 3]


def keeps_nothing(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    yield from pdfs
