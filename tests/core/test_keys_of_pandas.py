"""Keys that went through pandas, where NaN and NULL of a column of floats become one, find their keys again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from batch_driver import made
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_state_ext.errors import StateValueError
from spark_state_ext.functions.state_batch import StateBatch

NAN = float("nan")
STATE = pa.schema([("n", pa.int64())])
POINT = pa.struct([("x", pa.float64()), ("tags", pa.list_(pa.float32()))])
Frame = Any


def batch_of(keys: list[Any], kind: pa.DataType | None = None) -> StateBatch:
    schema = pa.schema([("k", kind or pa.float64()), ("name", pa.string())])
    named = [(key, "same") for key in keys]
    rows = pa.table([pa.array(keys, schema[0].type), pa.array(["same"] * len(keys))], schema=schema)
    return made(schema, STATE, rows, named, [1] * len(keys))


def updated(batch: StateBatch) -> list[int | None]:
    """The new state of each key."""
    (table,) = batch.outcome.updates
    values = table.column("n").to_pylist()
    return [values[at] if at >= 0 else None for at in batch.outcome.source.tolist()]


def frame(pdf: pd.DataFrame) -> Frame:
    return pdf


def through_arrow(pdf: pd.DataFrame) -> Frame:
    return pa.Table.from_pandas(pdf, preserve_index=False)


def of_series(pdf: pd.DataFrame) -> Frame:
    return {name: pdf[name] for name in pdf.columns}


def of_numpy(pdf: pd.DataFrame) -> Frame:
    """Whose NaN stays NaN, though it may have been NULL."""
    return {name: pdf[name].to_numpy() for name in pdf.columns}


FORMS = [frame, through_arrow, of_series, of_numpy]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("missing", [NAN, None])
def test_nan_or_null_is_found_by_what_pandas_made_of_it(form: Callable[[Any], Frame], missing: float | None) -> None:
    for order in ([0, 1, 2], [2, 0, 1], [1]):
        batch = batch_of([1.0, missing, 2.0])
        pdf = batch.keys.to_pandas().assign(n=[10, 11, 12]).iloc[order]
        batch.update(form(pdf.reset_index(drop=True)))
        assert updated(batch) == [10 + at if at in order else None for at in range(3)]
        batch.remove(form(pdf.iloc[:1][["k", "name"]].reset_index(drop=True)))
        assert batch.outcome.source[order[0]] < 0


def test_nan_within_structs_and_lists() -> None:
    keys = [{"x": NAN, "tags": [1.0, NAN]}, {"x": 1.0, "tags": None}, None]
    batch = batch_of(keys, POINT)
    batch.update(batch.keys.to_pandas().assign(n=[0, 1, 2]).iloc[::-1])
    assert updated(batch) == [0, 1, 2]


@pytest.mark.parametrize("form", [frame, of_series])
def test_both_of_them_are_refused_through_pandas(form: Callable[[Any], Frame]) -> None:
    """Also one alone: it would find the key that is NULL, whichever it was."""
    batch = batch_of([NAN, 1.0, None])
    pdf = batch.keys.to_pandas().assign(n=[0, 1, 2])
    for rows in (pdf, pdf.iloc[:1], pdf.iloc[2:]):
        with pytest.raises(StateValueError, match="this batch has it with NaN and with NULL, which pandas does not"):
            batch.update(form(rows.reset_index(drop=True)))
    batch.update(form(pdf.iloc[1:2].reset_index(drop=True)))
    assert updated(batch) == [None, 1, None]


def test_both_of_them_are_told_apart_by_arrow_and_by_pandas_own_types() -> None:
    for own_types in (False, True):
        batch = batch_of([NAN, 1.0, None])
        rows = batch.keys.append_column("n", pa.array([0, 1, 2])).take(pa.array([2, 0]))
        batch.update(rows.to_pandas(types_mapper=pd.ArrowDtype) if own_types else rows)
        assert updated(batch) == [0, None, 2]


def test_a_key_that_is_not_there_stays_an_error() -> None:
    batch = batch_of([1.0, 2.0])
    for given_key in (NAN, None, 3.0):
        with pytest.raises(StateValueError, match="which is not in this batch"):
            batch.update(pd.DataFrame({"k": [given_key], "name": ["same"], "n": [1]}))


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([NAN, None, 0.0, 1.0, -np.inf]), min_size=1, max_size=5, unique_by=repr),
    st.data(),
)
def test_rows_go_to_their_keys_or_nowhere(keys: list[Any], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(keys) - 1), min_size=1, unique=True))
    form = data.draw(st.sampled_from(FORMS))
    batch = batch_of(keys)
    pdf = batch.keys.to_pandas().assign(n=range(len(keys))).iloc[order].reset_index(drop=True)
    both = sum(key is None or key != key for key in keys) == 2
    try:
        batch.update(form(pdf))
    except StateValueError:
        assert both
    else:
        # A table that somebody else has made of pandas' says NULL, and that is taken at its word.
        if not (both and form in (through_arrow, of_numpy)):
            assert updated(batch) == [at if at in order else None for at in range(len(keys))]
