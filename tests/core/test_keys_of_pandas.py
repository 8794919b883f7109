"""Keys that went through pandas, which does not distinguish NaN and NULL of a float column, are found again."""

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


def make_batch(keys: list[Any], kind: pa.DataType | None = None) -> StateBatch:
    schema = pa.schema([("k", kind or pa.float64()), ("name", pa.string())])
    keys_with_names = [(key, "same") for key in keys]
    rows = pa.table([pa.array(keys, schema[0].type), pa.array(["same"] * len(keys))], schema=schema)
    return made(schema, STATE, rows, keys_with_names, [1] * len(keys))


def read_updates(batch: StateBatch) -> list[int | None]:
    """Return the new state of each key."""
    (table,) = batch.outcome.updates
    values = table.column("n").to_pylist()
    return [values[source] if source >= 0 else None for source in batch.outcome.source.tolist()]


def keep_frame(pdf: pd.DataFrame) -> Frame:
    return pdf


def convert_to_arrow(pdf: pd.DataFrame) -> Frame:
    return pa.Table.from_pandas(pdf, preserve_index=False)


def convert_to_series(pdf: pd.DataFrame) -> Frame:
    return {name: pdf[name] for name in pdf.columns}


def convert_to_numpy(pdf: pd.DataFrame) -> Frame:
    """Convert to NumPy arrays, where NaN stays NaN even if it was NULL."""
    return {name: pdf[name].to_numpy() for name in pdf.columns}


FORMS = [keep_frame, convert_to_arrow, convert_to_series, convert_to_numpy]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("missing", [NAN, None])
def test_a_key_with_nan_or_null_is_found_after_pandas_converted_it(
    form: Callable[[Any], Frame], missing: float | None
) -> None:
    for order in ([0, 1, 2], [2, 0, 1], [1]):
        batch = make_batch([1.0, missing, 2.0])
        pdf = batch.keys.to_pandas().assign(n=[10, 11, 12]).iloc[order]
        batch.update(form(pdf.reset_index(drop=True)))
        assert read_updates(batch) == [10 + position if position in order else None for position in range(3)]
        batch.remove(form(pdf.iloc[:1][["k", "name"]].reset_index(drop=True)))
        assert batch.outcome.source[order[0]] < 0


def test_keys_with_nan_within_structs_and_lists_are_found() -> None:
    keys = [{"x": NAN, "tags": [1.0, NAN]}, {"x": 1.0, "tags": None}, None]
    batch = make_batch(keys, POINT)
    batch.update(batch.keys.to_pandas().assign(n=[0, 1, 2]).iloc[::-1])
    assert read_updates(batch) == [0, 1, 2]


@pytest.mark.parametrize("form", [keep_frame, convert_to_series])
def test_a_batch_with_both_nan_and_null_is_refused_through_pandas(form: Callable[[Any], Frame]) -> None:
    """A frame with only one of them is also refused, because it would always find the NULL key."""
    batch = make_batch([NAN, 1.0, None])
    pdf = batch.keys.to_pandas().assign(n=[0, 1, 2])
    for rows in (pdf, pdf.iloc[:1], pdf.iloc[2:]):
        with pytest.raises(StateValueError, match="this batch has it with NaN and with NULL, which pandas does not"):
            batch.update(form(rows.reset_index(drop=True)))
    batch.update(form(pdf.iloc[1:2].reset_index(drop=True)))
    assert read_updates(batch) == [None, 1, None]


def test_nan_and_null_are_distinguished_by_arrow_and_by_arrow_types_of_pandas() -> None:
    for own_types in (False, True):
        batch = make_batch([NAN, 1.0, None])
        rows = batch.keys.append_column("n", pa.array([0, 1, 2])).take(pa.array([2, 0]))
        batch.update(rows.to_pandas(types_mapper=pd.ArrowDtype) if own_types else rows)
        assert read_updates(batch) == [0, None, 2]


def test_a_key_that_is_not_in_the_batch_is_an_error() -> None:
    batch = make_batch([1.0, 2.0])
    for key in (NAN, None, 3.0):
        with pytest.raises(StateValueError, match="which is not in this batch"):
            batch.update(pd.DataFrame({"k": [key], "name": ["same"], "n": [1]}))


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([NAN, None, 0.0, 1.0, -np.inf]), min_size=1, max_size=5, unique_by=repr),
    st.data(),
)
def test_rows_update_their_own_keys_or_are_refused(keys: list[Any], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(keys) - 1), min_size=1, unique=True))
    form = data.draw(st.sampled_from(FORMS))
    batch = make_batch(keys)
    pdf = batch.keys.to_pandas().assign(n=range(len(keys))).iloc[order].reset_index(drop=True)
    both = sum(key is None or key != key for key in keys) == 2
    try:
        batch.update(form(pdf))
    except StateValueError:
        assert both
    else:
        # Tables and arrays that were made from a frame have lost the distinction; their NULL or NaN is used as it is.
        if not (both and form in (convert_to_arrow, convert_to_numpy)):
            assert read_updates(batch) == [position if position in order else None for position in range(len(keys))]
