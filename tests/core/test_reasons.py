"""Errors explain why a value is refused without details of Python's implementation."""

from __future__ import annotations

import datetime as dt
import json
import re
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from arrow_schemas.checksum import report_damage
from arrow_schemas.row import RowSchema
from spark_state_ext.cli.values import parse_value
from spark_state_ext.errors import CorruptFileError, StateError
from spark_state_ext.functions.arguments import to_milliseconds
from spark_state_ext.functions.conversion_errors import explain_conversion_error
from spark_state_ext.functions.tables import as_table
from spark_state_ext.reading.lookup import LookupKey

TYPES = [
    pa.int8(),
    pa.int64(),
    pa.float64(),
    pa.bool_(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us"),
    pa.decimal128(5, 2),
    pa.list_(pa.int32()),
    pa.struct([("a", pa.date32())]),
]
VALUES: list[Any] = [
    5,
    1 << 70,
    2.5,
    float("nan"),
    True,
    "word",
    b"bytes",
    dt.date(2026, 1, 31),
    dt.datetime(2026, 1, 31, 12, tzinfo=dt.timezone.utc),
    Decimal("123456.789"),
    [dt.date(2026, 1, 31)],
    {"a": 5},
    {"b": 5},
    object(),
]
# Words of Python's own errors: attributes, parsers, formats of `struct`, classes.
PYTHON_DETAILS = re.compile(
    r"attribute|<class|invalid literal|could not convert string|isoformat|interpreted as an integer|requires|argument"
    r"|ConversionSyntax|base 10|toordinal|Error\("
)


def call_and_get_error(call: Any, *arguments: Any) -> str:
    """Return the error message of a call, or an empty text if it succeeds."""
    try:
        call(*arguments)
    except StateError as error:
        return str(error)
    return ""


def test_errors_about_wrong_values_do_not_show_details_of_python() -> None:
    messages = []
    for kind in TYPES:
        field = pa.field("k", kind)
        messages += [call_and_get_error(LookupKey.of, (value,), ["k"], RowSchema((field,), ())) for value in VALUES]
        messages += [
            call_and_get_error(parse_value, word, field)
            for word in ("word", "1e", "[5", "2026-13-40", "99999999999999999999")
        ]
    messages += [
        call_and_get_error(to_milliseconds, value, True)
        for value in ([dt.date(2026, 1, 31)], [object()], ["x"], "x", [1 << 70])
    ]
    messages += [call_and_get_error(as_table, rows, "it was given") for rows in ({"a": [1, "x"]}, {"a": [object()]})]
    refused = [text for text in messages if text]
    assert len(refused) > 100
    assert [text for text in refused if PYTHON_DETAILS.search(text)] == []


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: dt.date(2026, 1, 31).tzinfo, "it is of type date"),  # type: ignore[attr-defined]
        (lambda: int("word"), "it is not a number"),
        (lambda: dt.date.fromisoformat("word"), "it is not a date or time, such as 2026-01-31 or 2026-01-31T12:00:00"),
        (lambda: Decimal("word"), "it is not a decimal number that fits"),
        (lambda: (1 << 70).to_bytes(2, "big"), "it is out of range"),
        (lambda: pa.scalar("word", pa.date32()), "object of type str cannot be converted to int"),
        (lambda: dt.date(0, 1, 1), "year 0 is out of range"),
    ],
)
def test_conversion_errors_are_explained(call: Any, reason: str) -> None:
    with pytest.raises(Exception) as raised:  # whatever Python raises
        call()
    assert explain_conversion_error(raised.value, dt.date(2026, 1, 31)) == reason


@pytest.mark.parametrize(
    ("read", "damage"),
    [
        (lambda fields: fields["id"], "its field 'id' is missing"),
        (lambda fields: fields["n"]["deep"], "one of its fields is missing or has the wrong type"),
        (lambda fields: json.loads("{"), "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (lambda fields: fields["n"].to_bytes(1, "big"), "a number in it is out of range"),
    ],
)
def test_report_damage_explains_what_is_wrong_with_a_file(read: Any, damage: str) -> None:
    with pytest.raises(CorruptFileError) as raised, report_damage("x.json", "record of a run"):
        read({"n": 300})
    assert str(raised.value) == f"x.json is not a valid record of a run: {damage}"
