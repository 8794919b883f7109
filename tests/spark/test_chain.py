"""A chain runs several stateful steps on the same keys in one operator; a plain Python loop gives the expected rows."""

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


def add_up(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Add values up; yield only even totals, so that the next step has no rows in some batches."""
    (total,) = state.getOption or (0,)
    total += sum(int(pdf["value"].sum()) for pdf in pdfs)
    state.update((total,))
    if total % 2 == 0:
        yield pd.DataFrame({"total": [total]})


def track_peak(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Yield the highest total so far, and the number of totals."""
    peak, seen = state.getOption or (-(2**62), 0)
    for pdf in pdfs:
        assert list(pdf.columns) == ["total"]
        peak, seen = max(peak, int(pdf["total"].max())), seen + len(pdf)
    state.update((peak, seen))
    yield pd.DataFrame({"key": [int(key[0])], "peak": [peak], "seen": [seen]})


BATCHES = [[(1, 2), (2, 1)], [(1, -4), (2, 3), (3, 5)], [(1, 1), (2, 2)], [(1, 9), (3, 1)]]


def expected_peaks() -> dict[int, tuple[int, int]]:
    totals: dict[int, int] = {}
    result: dict[int, tuple[int, int]] = {}
    for batch in BATCHES:
        for key in sorted({k for k, _ in batch}):
            totals[key] = totals.get(key, 0) + sum(v for k, v in batch if k == key)
            if totals[key] % 2 == 0:
                peak, seen = result.get(key, (-(2**62), 0))
                result[key] = (max(peak, totals[key]), seen + 1)
    return result


def test_each_step_keeps_its_own_state_and_passes_its_output_to_the_next(spark: SparkSession, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    state = ArrowState(str(tmp_path / "root"), "chained", buckets=2, local_dir=str(tmp_path / "local"))
    state_type = StructType([StructField("peak", LongType()), StructField("seen", LongType())])
    steps = chain(Step(add_up, RUNNING, RUNNING), Step(track_peak, PEAKS, state_type))
    rows: dict[int, tuple[int, int]] = {}
    for at, batch in enumerate(BATCHES):
        table = pa.table({"key": [k for k, _ in batch], "value": [v for _, v in batch]})
        pq.write_table(table, source / f"{at}.parquet")
        os.utime(source / f"{at}.parquet", (1_000_000 + at, 1_000_000 + at))
        # The query restarts for each file, so the state of both steps is loaded again each time.
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
    assert rows == expected_peaks()


def test_a_chain_of_one_step_is_refused() -> None:
    with pytest.raises(UsageError, match="at least two"):
        chain(Step(add_up, RUNNING, RUNNING))


def test_the_schemas_of_a_step_may_be_ddl_strings(spark: SparkSession) -> None:
    step = Step(add_up, "total bigint, tags array<string>", "total bigint")
    assert step.outputStructType == StructType([*RUNNING, StructField("tags", ArrayType(StringType()))])
    assert step == Step(add_up, step.outputStructType, RUNNING)


def test_a_schema_of_another_type_and_ddl_without_a_session_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="stateStructType of a Step must be a StructType or a DDL string, not 7"):
        Step(add_up, RUNNING, 7)  # type: ignore[arg-type]  # refused
    monkeypatch.setattr(chained, "_find_active_session", lambda: None)
    with pytest.raises(
        UsageError, match=r"outputStructType of a Step is the DDL string 'n long', .*create the session"
    ):
        Step(add_up, "n long", RUNNING)


def run_once(steps: Chain, key: Any = 1, values: Any = (1, 2)) -> list[pd.DataFrame]:
    """Return the frames of a chain for a key with rows and without state."""
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
def test_a_step_may_give_its_rows_in_every_form_that_a_function_may(form: str, place: int) -> None:
    def give_form(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        assert sum(map(len, pdfs)) == 2
        state.update((place,))
        return FORMS[form]()

    def pass_frames(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        for pdf in pdfs:
            assert list(pdf.columns) in (["value"], ["name", "n"])
            yield pdf if "n" in pdf else pd.DataFrame({"name": ["x", "y"], "n": [0, 0]})

    functions = [give_form if at == place else pass_frames for at in range(3)]
    frame = pd.concat(run_once(chain(*(Step(function, NAMED, RUNNING) for function in functions))))
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
def test_rows_of_a_wrong_form_are_refused_with_the_message_of_a_single_function(
    given: Any, text: str, place: int
) -> None:
    def give_rows(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        assert len(list(pdfs)) == 1
        return ROWS

    def give_wrong_rows(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        assert len(list(pdfs)) == 1
        return given

    steps = [Step(give_wrong_rows if at == place else give_rows, NAMED, RUNNING) for at in range(2)]
    with pytest.raises(StateValueError, match=text):
        run_once(chain(*steps))


@pytest.mark.parametrize("place", [0, 1])
def test_the_error_for_a_frame_with_other_columns_names_the_step(place: int) -> None:
    def give_rows(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        assert len(list(pdfs)) == 1
        return ROWS

    for given, text in (
        (pd.DataFrame({"Name": ["a"], "n": [1]}), "the columns Name, n"),
        (pd.DataFrame([["a", 1, 2]]), "the columns 3 without names"),
    ):

        def give_wrong_frame(
            key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState, given: pd.DataFrame = given
        ) -> Any:
            assert len(list(pdfs)) == 1
            return [given]

        steps = [Step(give_wrong_frame if at == place else give_rows, NAMED, RUNNING) for at in range(2)]
        with pytest.raises(StateValueError, match=f"step {place} returned a frame with {text}, but .* has name, n"):
            run_once(chain(*steps))


def test_a_step_that_reads_only_part_of_its_input_does_not_stop_the_step_before() -> None:
    def count(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        (n,) = state.getOption or (0,)
        for pdf in pdfs:
            n += len(pdf)
            yield pd.DataFrame({"total": [n]})
        state.update((n,))

    def read_one_frame(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        yield next(iter(pdfs)).assign(key=1, peak=0)[["key", "peak"]].assign(seen=0)

    steps = chain(Step(count, RUNNING, RUNNING), Step(read_one_frame, PEAKS, PEAKS))
    stored: Any = None
    for expected_n in (3, 6):
        state = KeyState(stored, Clock(1, -1, "NoTimeout", False, False, steps.stateStructType))
        frames = iter([pd.DataFrame({"value": [1]}), pd.DataFrame({"value": [1, 2]})])
        assert len(list(steps.func((1,), frames, state))) == 1
        stored = state.getOption
        assert stored is not None
        assert tuple(stored[0]) == (expected_n,)


def test_a_list_of_the_state_changed_in_place_without_update_is_not_stored() -> None:
    """A function without a chain behaves in the same way. Here the other step does update its state."""
    list_state = StructType([StructField("all", ArrayType(LongType()))])

    def change(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        if state.exists:
            state.get[0].append(99)
        else:
            state.update(([0],))
        return {"total": [len(list(pdfs))]}

    def count(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        (n,) = state.getOption or (0,)
        state.update((n + len(list(pdfs)),))
        return []

    steps = chain(Step(change, RUNNING, list_state), Step(count, RUNNING, RUNNING))
    stored: Any = None
    for batch in (1, 2, 3):
        state = KeyState(stored, Clock(1, -1, "NoTimeout", False, False, steps.stateStructType))
        list(steps.func((1,), iter([pd.DataFrame({"value": [batch]})]), state))
        stored = state.getOption
        assert stored is not None
        assert (stored[0][0], stored[2][0]) == ([0], batch)


def test_a_list_of_the_state_changed_in_place_and_given_to_update_is_stored() -> None:
    list_state = StructType([StructField("all", ArrayType(LongType()))])

    def append_values(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        values = state.get[0] if state.exists else []
        values += [int(value) for pdf in pdfs for value in pdf["value"]]
        state.update((values,))
        return {"total": [len(values)]}

    steps = chain(Step(append_values, RUNNING, list_state), Step(pass_on, RUNNING, RUNNING))
    stored: Any = None
    for batch in (1, 2, 3):
        state = KeyState(stored, Clock(1, -1, "NoTimeout", False, False, steps.stateStructType))
        list(steps.func((1,), iter([pd.DataFrame({"value": [batch]})]), state))
        assert state.touched
        stored = state.getOption
    assert list(stored[0][0]) == [1, 2, 3]


def pass_on(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    yield from pdfs
