"""The differences that docs/parity.md lists: results of Spark's operator and of ours on the same input.

The expected results are those of PySpark 4.3; a test names the older releases that are known to differ.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from jobs import CLASSIC, SPARK, Job, keyed
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from streams import collect, read, write_batches

from spark_state_ext import Agg, ArrowState, aggregate
from spark_state_ext.errors import UnsupportedTypeError
from tests.helpers.soak import whole

pytestmark = [pytest.mark.spark, CLASSIC]

DECIMAL = decimal.Decimal
ANSI = "spark.sql.ansi.enabled"


def read_back(session: Any, operator: str, folder: Path, schema: str, values: tuple[Any, ...]) -> str:
    """Store values in the state and return what the next batch reads, as text."""
    folder.mkdir(exist_ok=True)

    def keep(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if not state.exists:
            state.update(values)
        else:
            yield pd.DataFrame({"text": [repr(state.get)]})

    rows = Job(session, operator, folder, keep, state=schema).run(keyed("a"), keyed("a"))
    ((text,),) = rows[1]
    return str(text)


def refusal_of(session: Any, operator: str, folder: Path, schema: str, values: tuple[Any, ...]) -> str:
    """Return the error for values that cannot be stored."""
    with pytest.raises(Exception, match=r"STREAM_FAILED|terminated with exception") as raised:
        read_back(session, operator, folder, schema, values)
    return str(raised.value)


# -- keys -----------------------------------------------------------------------------------------


def test_zero_and_minus_zero_are_one_key_and_two_keys_for_spark(session: Any, operator: str, tmp_path: Path) -> None:
    def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
        state.update((n,))
        yield pd.DataFrame({"text": [f"{key[0]}: {n}"]})

    def batch(*keys: float) -> Any:
        return pa.table({"key": pa.array(keys, pa.float64())})

    job = Job(session, operator, tmp_path, count, schema=batch().schema)
    rows = job.run(batch(0.0), batch(-0.0), batch(0.0))
    texts = [rows[at][0][0] for at in range(3)]
    # Spark finds state by the bytes of the key.
    assert texts == (["0.0: 1", "-0.0: 1", "0.0: 2"] if operator == "spark" else ["0.0: 1", "-0.0: 2", "0.0: 3"])


# -- values of the state --------------------------------------------------------------------------


def test_integers_outside_their_type_are_refused_and_wrap_or_are_null_in_spark(
    session: Any, operator: str, tmp_path: Path
) -> None:
    schema, values = "a tinyint, b smallint, c int, d bigint", (300, 40_000, 2**32 + 5, 2**63)
    if operator == "spark":
        # Integers that a Java long can hold wrap around; Spark reads others as NULL.
        assert read_back(session, operator, tmp_path, schema, values) == "(44, -25536, 5, None)"
        return
    values_by_name = dict(zip("abcd", values, strict=True))
    for at, (name, value) in enumerate(values_by_name.items()):
        one_too_large = tuple(value if name == other else 1 for other in values_by_name)
        text = refusal_of(session, operator, tmp_path / str(at), schema, one_too_large)
        assert "StateValueError: state column '" + name in text
        assert str(value) in text


@pytest.mark.parametrize("value", [pytest.param("1000", marks=pytest.mark.soak), "999.999"])
def test_a_decimal_outside_its_type_is_refused_and_spark_names_no_column(
    session: Any, operator: str, tmp_path: Path, value: str
) -> None:
    """One value is too large before rounding, the other only after it."""
    text = refusal_of(session, operator, tmp_path, "v decimal(5, 2)", (DECIMAL(value),))
    if operator == "spark":
        assert "StateValueError" not in text
        assert re.search("Decimal|NUMERIC_VALUE_OUT_OF_RANGE", text)
        assert "'v'" not in text
    else:
        assert f"StateValueError: state column 'v' of type decimal(5,2) cannot hold Decimal('{value}')" in text
        assert "key ('a',)" in text


@pytest.mark.parametrize(
    "value", [b"ab", pytest.param(bytearray(b"ab"), marks=pytest.mark.soak)], ids=["bytes", "bytearray"]
)
def test_bytes_become_text_in_a_string_column_and_a_java_address_in_spark(
    session: Any, operator: str, tmp_path: Path, value: Any
) -> None:
    text = read_back(session, operator, tmp_path, "v string", (value,))
    assert re.fullmatch(r"\('\[B@[0-9a-f]+',\)" if operator == "spark" else r"\('ab',\)", text)


def test_bytes_that_are_not_utf8_are_refused_in_a_string_column_and_not_by_spark(
    session: Any, operator: str, tmp_path: Path
) -> None:
    if operator == "spark":
        assert "[B@" in read_back(session, operator, tmp_path, "v string", (b"\xff",))
    else:
        assert "StateValueError: state column 'v'" in refusal_of(session, operator, tmp_path, "v string", (b"\xff",))


@pytest.mark.parametrize(
    ("given", "sparks", "ours"),
    [
        ({"Ab": 1, "cd": 2}, "(Row(Ab=None, cd=2),)", "(Row(Ab=1, cd=2),)"),
        ({"ab": 1, "cd": 2}, "(Row(Ab=1, cd=2),)", "(Row(Ab=None, cd=2),)"),
        ((1, 2), "(Row(Ab=1, cd=2),)", "(Row(Ab=1, cd=2),)"),
    ],
    ids=["declared names", "lower case", "no names"],
)
def test_fields_of_a_dict_keep_the_case_of_their_names_and_not_in_spark(
    session: Any, operator: str, tmp_path: Path, given: Any, sparks: str, ours: str
) -> None:
    """Spark 4.3 looks up the fields of a dict by their names in lower case; 3.5 and 4.0 do not."""
    text = read_back(session, operator, tmp_path, "v struct<Ab: int, cd: int>", (given,))
    assert text == (sparks if operator == "spark" and SPARK >= (4, 3) else ours)


@pytest.mark.parametrize(
    ("schema", "value", "missing"),
    [("v array<int>", [1, 2], "elementType"), ("v map<string, int>", {"x": 1}, "keyType")],
    ids=["array", "map"],
)
def test_arrays_and_maps_come_back_from_the_state_and_not_in_spark_4_2(
    session: Any, operator: str, tmp_path: Path, schema: str, value: Any, missing: str
) -> None:
    """Since 4.2, Spark's own operator cannot read the schema of such state."""
    if operator == "spark" and SPARK >= (4, 2):
        assert f"KeyError: '{missing}'" in refusal_of(session, operator, tmp_path, schema, (value,))
    else:
        assert read_back(session, operator, tmp_path, schema, (value,)) == repr((value,))


# Type of the column, value, and what the next batch reads with Spark and with us; None stands for a `StateValueError`.
UNFIT = {
    "text for a number": ("int", "many", "None", None),
    "a boolean for a number": ("int", True, "None", None),
    "NaN for text": ("string", float("nan"), "'NaN'", "None"),
    "NaN for a number": ("bigint", float("nan"), "None", "None"),
    "a number too large for a float": ("float", 1e300, "inf", None),
    "an int for a double": ("double", 1, "None", "1.0"),
    "an int for a float": ("float", 1, "None", "1.0"),
    "None in a NOT NULL column": ("bigint NOT NULL", None, "0", None),
    "a decimal with too many places": ("decimal(5, 2)", DECIMAL("1.005"), "Decimal('1.01')", "Decimal('1.01')"),
    "a dict without a field": ("struct<x: int, y: int>", {"y": 2}, "Row(x=None, y=2)", "Row(x=None, y=2)"),
    "a dict with another field": ("struct<x: int>", {"x": 1, "z": 3}, "Row(x=1)", "Row(x=1)"),
}


def test_unfit_values_are_refused_or_converted_and_often_become_null_in_spark(
    session: Any, operator: str, tmp_path: Path
) -> None:
    """One query stores all accepted values; each refused value has its own query."""
    columns = {f"c{at}": case for at, case in enumerate(UNFIT.values())}
    accepted = {name: case for name, case in columns.items() if operator == "spark" or case[3] is not None}
    schema = ", ".join(f"{name} {kind}" for name, (kind, *_) in accepted.items())
    text = read_back(
        session, operator, tmp_path / "accepted", schema, tuple(value for _, value, *_ in accepted.values())
    )
    expected = [sparks if operator == "spark" else ours for *_, sparks, ours in accepted.values()]
    assert text == f"({', '.join(map(str, expected))})"
    for name, (kind, value, *_) in columns.items():
        if name not in accepted:
            text = refusal_of(session, operator, tmp_path / name, f"{name} {kind}", (value,))
            assert f"StateValueError: state column '{name}'" in text
            assert "key ('a',)" in text


def test_a_number_in_a_date_column_is_refused_and_spark_names_no_key(
    session: Any, operator: str, tmp_path: Path
) -> None:
    text = refusal_of(session, operator, tmp_path, "v date", (5,))
    if operator == "spark":
        assert "'int' object has no attribute 'toordinal'" in text
        assert "('a',)" not in text
    else:
        assert "StateValueError: state column 'v'" in text
        assert "key ('a',)" in text


@pytest.mark.parametrize(
    "values", [pytest.param((1,), id="too short", marks=pytest.mark.soak), pytest.param((1, 2, 3), id="too long")]
)
def test_a_tuple_of_the_wrong_length_is_refused_and_spark_names_no_line(
    session: Any, operator: str, tmp_path: Path, values: tuple[int, ...]
) -> None:
    text = refusal_of(session, operator, tmp_path, "a int, b int", values)
    if operator == "spark":
        expected = "STRUCT_ARRAY_LENGTH_MISMATCH" if SPARK >= (4, 0) else "expected number of values"
        assert expected in text
        assert "in keep" not in text
        assert "('a',)" not in text
    else:
        assert "StateValueError" in text
        assert "in keep" in text, "the error names the line of the call"
        assert "key ('a',)" in text


def test_a_map_whose_keys_become_equal_is_refused_and_not_by_spark(session: Any, operator: str, tmp_path: Path) -> None:
    schema, value = "v map<decimal(5, 2), int>", {DECIMAL("1.001"): 1, DECIMAL("1.002"): 2}
    if operator == "arrow":
        assert "StateValueError: state column 'v'" in refusal_of(session, operator, tmp_path, schema, (value,))
    elif SPARK < (4, 2):  # later releases do not read maps back at all
        assert "1" in read_back(session, operator, tmp_path, schema, (value,))


def test_a_timeout_outside_a_long_is_refused_and_fires_at_once_in_spark(
    session: Any, operator: str, tmp_path: Path
) -> None:
    """Spark's timeout wraps around to the past, so it fires in the same batch."""

    def set_timeout(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if key[0] == "a" and not state.hasTimedOut:
            state.update((1,))
            state.setTimeoutDuration(2**63 - 1)
        elif state.hasTimedOut:
            state.remove()
            yield pd.DataFrame({"text": ["timed out"]})

    job = Job(session, operator, tmp_path, set_timeout, timeout=GroupStateTimeout.ProcessingTimeTimeout)
    job.conf = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}
    if operator == "spark":
        assert job.run(keyed("a"))[0] == [("timed out",)]
    else:
        with pytest.raises(Exception, match=r"StateValueError.*key \('a',\)"):
            job.run(keyed("a"))


def test_the_error_for_one_row_instead_of_a_list_names_the_key_and_not_in_spark(
    session: Any, operator: str, tmp_path: Path
) -> None:
    def return_one_row(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        return (key[0], 1)

    with pytest.raises(Exception) as raised:
        Job(session, operator, tmp_path, return_one_row, "key string, n bigint").run(keyed("a"))
    text = str(raised.value)
    if operator == "spark":
        assert "UDF_RETURN_TYPE" in text
        assert "('a',)" not in text
    else:
        assert "ResultTypeError" in text
        assert "key ('a',)" in text
        assert "batch 0" in text


# -- expressions and collations as keys ------------------------------------------------------------


def test_keys_may_be_expressions_and_not_in_spark_and_collations_are_refused(
    session: Any, operator: str, tmp_path: Path
) -> None:
    """Our operator refuses collations when it plans, Spark's when it runs."""

    def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"text": [f"{key[0]} {sum(len(pdf) for pdf in pdfs)}"]})

    (tmp_path / "expression").mkdir()
    by_digit = Job(session, operator, tmp_path / "expression", count, keys=[F.col("value") % 2])
    if operator == "spark":
        with pytest.raises(Exception, match=r"(?i)attribute|grouping|column|expression"):
            by_digit.run(keyed("a", "b", "a"))
    else:
        assert by_digit.run(keyed("a", "b", "a")) == {0: [("0 2",), ("1 1",)]}
    if SPARK >= (4, 0):
        (tmp_path / "collated").mkdir()
        collated = Job(session, operator, tmp_path / "collated", count)
        collated.before = lambda df: df.selectExpr("collate(key, 'UTF8_LCASE') AS key", "value")
        error = "STATE_STORE_UNSUPPORTED_OPERATION_BINARY_INEQUALITY" if operator == "spark" else "collation"
        with pytest.raises(StreamingQueryException if operator == "spark" else UnsupportedTypeError, match=error):
            collated.run(keyed("a", "A"))


# -- built-in aggregates --------------------------------------------------------------------------


def run_aggregates(
    session: Any, operator: str, folder: Path, kind: Any, batches: list[list[Any]], *names: str
) -> list[Any]:
    """Return the aggregates of one key after each batch, as text, which shows the sign of zero."""
    columns = [
        pa.table({"k": pa.array([1] * len(values), pa.int64()), "x": pa.array(values, kind)}) for values in batches
    ]
    sparks_kind = {pa.int64(): "bigint", pa.float64(): "double"}.get(kind, "decimal(38, 0)")
    frame = read(session, write_batches(folder / "in", columns), f"k bigint, x {sparks_kind}")
    if operator == "spark":
        out = frame.groupBy("k").agg(*[getattr(F, name)("x").alias(name) for name in names])
    else:
        state = ArrowState(str(folder / "root"), "sums", buckets=2, local_dir=str(folder / "local"))
        out = aggregate(state, frame, "k", {name: getattr(Agg, name)("x") for name in names})
    return [{name: str(row[name]) for name in names} for row in collect(session, out, "update")]


TOO_LARGE: dict[str, tuple[Any, list[list[Any]]]] = {
    "bigint in a batch": (pa.int64(), [[2**63 - 1, 1]]),
    "bigint over batches": (pa.int64(), [[2**63 - 1], [1]]),
    "decimal": (pa.decimal128(38, 0), [[DECIMAL("9" * 38)] * 2]),
}


@pytest.mark.parametrize(
    ("what", "ansi"),
    [
        ("decimal", "false"),
        *(
            pytest.param(what, ansi, marks=pytest.mark.soak)
            for what in TOO_LARGE
            for ansi in ("true", "false")
            if (what, ansi) != ("decimal", "false")
        ),
    ],
)
def test_a_sum_outside_its_type_is_an_error_and_wraps_or_is_null_in_spark_without_ansi(
    session: Any, operator: str, tmp_path: Path, what: str, ansi: str
) -> None:
    """With ANSI, the sum is an error in Spark, too."""
    before = session.conf.get(ANSI)
    session.conf.set(ANSI, ansi)
    try:
        if operator == "spark" and ansi == "false":
            last = run_aggregates(session, operator, tmp_path, *TOO_LARGE[what], "sum")[-1]
            assert last == {"sum": "None" if what == "decimal" else str(-(2**63))}
        else:
            with pytest.raises(Exception, match="ARITHMETIC_OVERFLOW" if operator == "spark" else "StateValueError"):
                run_aggregates(session, operator, tmp_path, *TOO_LARGE[what], "sum")
    finally:
        session.conf.set(ANSI, before)


@pytest.mark.parametrize(
    ("batches", "sparks", "ours"),
    [
        ([[-0.0]], ("-0.0", "-0.0", "0.0", "0.0"), ("0.0", "0.0", "-0.0", "-0.0")),
        *whole(
            [],
            [
                ([[0.0], [-0.0]], ("0.0", "0.0", "0.0", "0.0"), ("0.0", "0.0", "0.0", "0.0")),
                ([[-0.0], [0.0]], ("-0.0", "-0.0", "0.0", "0.0"), ("0.0", "0.0", "0.0", "0.0")),
            ],
        ),
    ],
)
def test_aggregates_of_zeros_may_have_another_sign_than_in_spark(
    session: Any, operator: str, tmp_path: Path, batches: list[list[float]], sparks: Any, ours: Any
) -> None:
    """Spark's min and max keep the sign of the first value, ours do not; its sums start with 0.0, ours with the first value."""
    names = ("min", "max", "sum", "mean")
    last = run_aggregates(session, operator, tmp_path, pa.float64(), batches, *names)[-1]
    assert last == dict(zip(names, sparks if operator == "spark" else ours, strict=True))
