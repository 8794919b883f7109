"""What docs/parity.md says is different from Spark: on the same input, what Spark's own operator does, and what ours does.

Run with PySpark 4.3; where a release before it is known to differ, the test says so.
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

pytestmark = [pytest.mark.spark, CLASSIC]

DECIMAL = decimal.Decimal
ANSI = "spark.sql.ansi.enabled"


def stored(session: Any, operator: str, folder: Path, schema: str, values: tuple[Any, ...]) -> str:
    """What a batch finds after the batch before has stored some values, as text."""
    folder.mkdir(exist_ok=True)

    def keep(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if not state.exists:
            state.update(values)
        else:
            yield pd.DataFrame({"text": [repr(state.get)]})

    rows = Job(session, operator, folder, keep, state=schema).run(keyed("a"), keyed("a"))
    ((text,),) = rows[1]
    return str(text)


def refused(session: Any, operator: str, folder: Path, schema: str, values: tuple[Any, ...]) -> str:
    """What is said of values that cannot be stored."""
    with pytest.raises(Exception, match=r"STREAM_FAILED|terminated with exception") as raised:
        stored(session, operator, folder, schema, values)
    return str(raised.value)


# -- keys -----------------------------------------------------------------------------------------


def test_signs_of_zero_are_one_key_and_not_two(session: Any, operator: str, tmp_path: Path) -> None:
    def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
        state.update((n,))
        yield pd.DataFrame({"text": [f"{key[0]}: {n}"]})

    def batch(*keys: float) -> Any:
        return pa.table({"key": pa.array(keys, pa.float64())})

    job = Job(session, operator, tmp_path, count, schema=batch().schema)
    rows = job.run(batch(0.0), batch(-0.0), batch(0.0))
    told = [rows[at][0][0] for at in range(3)]
    # Spark's state is found by the bytes of the key.
    assert told == (["0.0: 1", "-0.0: 1", "0.0: 2"] if operator == "spark" else ["0.0: 1", "-0.0: 2", "0.0: 3"])


# -- values of the state --------------------------------------------------------------------------


def test_integers_beyond_their_type(session: Any, operator: str, tmp_path: Path) -> None:
    schema, values = "a tinyint, b smallint, c int, d bigint", (300, 40_000, 2**32 + 5, 2**63)
    if operator == "spark":
        # Those that a Java long can hold wrap around; what it cannot is no number to Spark.
        assert stored(session, operator, tmp_path, schema, values) == "(44, -25536, 5, None)"
        return
    names = dict(zip("abcd", values, strict=True))
    for at, (name, value) in enumerate(names.items()):
        one = tuple(value if name == other else 1 for other in names)
        told = refused(session, operator, tmp_path / str(at), schema, one)
        assert "StateValueError: state column '" + name in told
        assert str(value) in told


@pytest.mark.parametrize("value", [pytest.param("1000", marks=pytest.mark.soak), "999.999"])
def test_a_decimal_beyond_its_column(session: Any, operator: str, tmp_path: Path, value: str) -> None:
    """Both refuse, before and after rounding; Spark names neither column nor key."""
    told = refused(session, operator, tmp_path, "v decimal(5, 2)", (DECIMAL(value),))
    if operator == "spark":
        assert "StateValueError" not in told
        assert re.search("Decimal|NUMERIC_VALUE_OUT_OF_RANGE", told)
        assert "'v'" not in told
    else:
        assert f"StateValueError: state column 'v' of type decimal(5,2) cannot hold Decimal('{value}')" in told
        assert "key ('a',)" in told


@pytest.mark.parametrize(
    "value", [b"ab", pytest.param(bytearray(b"ab"), marks=pytest.mark.soak)], ids=["bytes", "bytearray"]
)
def test_bytes_in_a_string_column(session: Any, operator: str, tmp_path: Path, value: Any) -> None:
    found = stored(session, operator, tmp_path, "v string", (value,))
    assert re.fullmatch(r"\('\[B@[0-9a-f]+',\)" if operator == "spark" else r"\('ab',\)", found)


def test_bytes_that_are_no_text_in_a_string_column(session: Any, operator: str, tmp_path: Path) -> None:
    if operator == "spark":
        assert "[B@" in stored(session, operator, tmp_path, "v string", (b"\xff",))
    else:
        assert "StateValueError: state column 'v'" in refused(session, operator, tmp_path, "v string", (b"\xff",))


@pytest.mark.parametrize(
    ("given", "sparks", "ours"),
    [
        ({"Ab": 1, "cd": 2}, "(Row(Ab=None, cd=2),)", "(Row(Ab=1, cd=2),)"),
        ({"ab": 1, "cd": 2}, "(Row(Ab=1, cd=2),)", "(Row(Ab=None, cd=2),)"),
        ((1, 2), "(Row(Ab=1, cd=2),)", "(Row(Ab=1, cd=2),)"),
    ],
    ids=["as declared", "lower case", "no names"],
)
def test_names_of_a_structs_fields(
    session: Any, operator: str, tmp_path: Path, given: Any, sparks: str, ours: str
) -> None:
    """From 4.0 on Spark looks for the fields of a dict by their names in lower case."""
    found = stored(session, operator, tmp_path, "v struct<Ab: int, cd: int>", (given,))
    assert found == (sparks if operator == "spark" and SPARK >= (4, 0) else ours)


@pytest.mark.parametrize(
    ("schema", "value", "missing"),
    [("v array<int>", [1, 2], "elementType"), ("v map<string, int>", {"x": 1}, "keyType")],
    ids=["array", "map"],
)
def test_arrays_and_maps(session: Any, operator: str, tmp_path: Path, schema: str, value: Any, missing: str) -> None:
    """From 4.2 on Spark's own operator cannot read the schema of such state back."""
    if operator == "spark" and SPARK >= (4, 2):
        assert f"KeyError: '{missing}'" in refused(session, operator, tmp_path, schema, (value,))
    else:
        assert stored(session, operator, tmp_path, schema, (value,)) == repr((value,))


# Of each: its column, the value, what Spark has in the next batch, and ours; None is a `StateValueError`.
UNFIT = {
    "text for a number": ("int", "many", "None", None),
    "a boolean for a number": ("int", True, "None", None),
    "NaN for text": ("string", float("nan"), "'NaN'", "None"),
    "NaN for a number": ("bigint", float("nan"), "None", "None"),
    "a number beyond a float": ("float", 1e300, "inf", None),
    "an int for a double": ("double", 1, "None", "1.0"),
    "an int for a float": ("float", 1, "None", "1.0"),
    "None where it must not be": ("bigint NOT NULL", None, "0", None),
    "places of a decimal": ("decimal(5, 2)", DECIMAL("1.005"), "Decimal('1.01')", "Decimal('1.01')"),
    "a dict without a field": ("struct<x: int, y: int>", {"y": 2}, "Row(x=None, y=2)", "Row(x=None, y=2)"),
    "a dict with another": ("struct<x: int>", {"x": 1, "z": 3}, "Row(x=1)", "Row(x=1)"),
}


def test_values_that_do_not_fit(session: Any, operator: str, tmp_path: Path) -> None:
    """Spark's in one query; ours refuses each for itself."""
    columns = {f"c{at}": it for at, it in enumerate(UNFIT.values())}
    taken = {name: it for name, it in columns.items() if operator == "spark" or it[3] is not None}
    schema = ", ".join(f"{name} {kind}" for name, (kind, *_) in taken.items())
    found = stored(session, operator, tmp_path / "taken", schema, tuple(value for _, value, *_ in taken.values()))
    expected = [sparks if operator == "spark" else ours for *_, sparks, ours in taken.values()]
    assert found == f"({', '.join(map(str, expected))})"
    for name, (kind, value, *_) in columns.items():
        if name not in taken:
            told = refused(session, operator, tmp_path / name, f"{name} {kind}", (value,))
            assert f"StateValueError: state column '{name}'" in told
            assert "key ('a',)" in told


def test_a_number_for_a_date(session: Any, operator: str, tmp_path: Path) -> None:
    told = refused(session, operator, tmp_path, "v date", (5,))
    if operator == "spark":
        assert "'int' object has no attribute 'toordinal'" in told
        assert "('a',)" not in told
    else:
        assert "StateValueError: state column 'v'" in told
        assert "key ('a',)" in told


@pytest.mark.parametrize(
    "values", [pytest.param((1,), id="too short", marks=pytest.mark.soak), pytest.param((1, 2, 3), id="too long")]
)
def test_a_tuple_of_the_wrong_length(session: Any, operator: str, tmp_path: Path, values: tuple[int, ...]) -> None:
    told = refused(session, operator, tmp_path, "a int, b int", values)
    if operator == "spark":
        expected = "STRUCT_ARRAY_LENGTH_MISMATCH" if SPARK >= (4, 0) else "expected number of values"
        assert expected in told
        assert "in keep" not in told
        assert "('a',)" not in told
    else:
        assert "StateValueError" in told
        assert "in keep" in told, "the line of the call"
        assert "key ('a',)" in told


def test_a_map_with_two_keys_that_are_one(session: Any, operator: str, tmp_path: Path) -> None:
    schema, value = "v map<decimal(5, 2), int>", {DECIMAL("1.001"): 1, DECIMAL("1.002"): 2}
    if operator == "arrow":
        assert "StateValueError: state column 'v'" in refused(session, operator, tmp_path, schema, (value,))
    elif SPARK < (4, 2):  # later releases do not read maps back at all
        assert "1" in stored(session, operator, tmp_path, schema, (value,))


def test_a_timeout_beyond_a_long(session: Any, operator: str, tmp_path: Path) -> None:
    """Spark's wraps around to the past, and so is over in the very batch."""

    def late(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if key[0] == "a" and not state.hasTimedOut:
            state.update((1,))
            state.setTimeoutDuration(2**63 - 1)
        elif state.hasTimedOut:
            state.remove()
            yield pd.DataFrame({"text": ["timed out"]})

    job = Job(session, operator, tmp_path, late, timeout=GroupStateTimeout.ProcessingTimeTimeout)
    job.conf = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}
    if operator == "spark":
        assert job.run(keyed("a"))[0] == [("timed out",)]
    else:
        with pytest.raises(Exception, match=r"StateValueError.*key \('a',\)"):
            job.run(keyed("a"))


def test_a_row_where_a_list_of_rows_was_meant(session: Any, operator: str, tmp_path: Path) -> None:
    def one(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
        return (key[0], 1)

    with pytest.raises(Exception) as raised:
        Job(session, operator, tmp_path, one, "key string, n bigint").run(keyed("a"))
    told = str(raised.value)
    if operator == "spark":
        assert "UDF_RETURN_TYPE" in told
        assert "('a',)" not in told
    else:
        assert "ResultTypeError" in told
        assert "key ('a',)" in told
        assert "batch 0" in told


# -- keys and what they are grouped by ------------------------------------------------------------


def test_expressions_and_collations_as_keys(session: Any, operator: str, tmp_path: Path) -> None:
    """Spark's operator takes no expressions; neither takes collations, ours when it plans, Spark's when it runs."""

    def counted(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"text": [f"{key[0]} {sum(len(pdf) for pdf in pdfs)}"]})

    (tmp_path / "expression").mkdir()
    by_digit = Job(session, operator, tmp_path / "expression", counted, keys=[F.col("value") % 2])
    if operator == "spark":
        with pytest.raises(Exception, match=r"(?i)attribute|grouping|column|expression"):
            by_digit.run(keyed("a", "b", "a"))
    else:
        assert by_digit.run(keyed("a", "b", "a")) == {0: [("0 2",), ("1 1",)]}
    if SPARK >= (4, 0):
        (tmp_path / "collated").mkdir()
        collated = Job(session, operator, tmp_path / "collated", counted)
        collated.before = lambda df: df.selectExpr("collate(key, 'UTF8_LCASE') AS key", "value")
        unfit = "STATE_STORE_UNSUPPORTED_OPERATION_BINARY_INEQUALITY" if operator == "spark" else "collation"
        with pytest.raises(StreamingQueryException if operator == "spark" else UnsupportedTypeError, match=unfit):
            collated.run(keyed("a", "A"))


# -- built-in aggregates --------------------------------------------------------------------------


def aggregated(
    session: Any, operator: str, folder: Path, kind: Any, batches: list[list[Any]], *names: str
) -> list[Any]:
    """What aggregates of one key come to, batch after batch; text, for the signs."""
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


BEYOND: dict[str, tuple[Any, list[list[Any]]]] = {
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
            for what in BEYOND
            for ansi in ("true", "false")
            if (what, ansi) != ("decimal", "false")
        ),
    ],
)
def test_a_sum_beyond_its_type(session: Any, operator: str, tmp_path: Path, what: str, ansi: str) -> None:
    """Ours is an error whatever the setting says; Spark's is one with ANSI, wraps around or is NULL without."""
    before = session.conf.get(ANSI)
    session.conf.set(ANSI, ansi)
    try:
        if operator == "spark" and ansi == "false":
            last = aggregated(session, operator, tmp_path, *BEYOND[what], "sum")[-1]
            assert last == {"sum": "None" if what == "decimal" else str(-(2**63))}
        else:
            with pytest.raises(Exception, match="ARITHMETIC_OVERFLOW" if operator == "spark" else "StateValueError"):
                aggregated(session, operator, tmp_path, *BEYOND[what], "sum")
    finally:
        session.conf.set(ANSI, before)


@pytest.mark.parametrize(
    ("batches", "sparks", "ours"),
    [
        ([[-0.0]], ("-0.0", "-0.0", "0.0", "0.0"), ("0.0", "0.0", "-0.0", "-0.0")),
        ([[0.0], [-0.0]], ("0.0", "0.0", "0.0", "0.0"), ("0.0", "0.0", "0.0", "0.0")),
        ([[-0.0], [0.0]], ("-0.0", "-0.0", "0.0", "0.0"), ("0.0", "0.0", "0.0", "0.0")),
    ],
    ids=["negative", "negative last", "negative first"],
)
def test_signs_of_zero_in_aggregates(
    session: Any, operator: str, tmp_path: Path, batches: list[list[float]], sparks: Any, ours: Any
) -> None:
    """Spark's least and largest have the sign of what came first, ours none; its sums begin with 0.0, ours with the first."""
    names = ("min", "max", "sum", "mean")
    last = aggregated(session, operator, tmp_path, pa.float64(), batches, *names)[-1]
    assert last == dict(zip(names, sparks if operator == "spark" else ours, strict=True))
