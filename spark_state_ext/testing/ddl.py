"""Parses Spark's DDL for schemas without Spark: ``"user string, n bigint"`` becomes what `StructType.json` has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from spark_state_ext.errors import UnsupportedTypeError, UsageError

__all__ = ["ddl_struct"]

_TOKEN = re.compile(
    r"""\s*(?:
        `(?P<quoted>(?:[^`]|``)+)` | '(?P<text>[^']*)' | "(?P<text2>[^"]*)" | (?P<word>\w+) | (?P<mark>[<>(),:-])
    )""",
    re.VERBOSE,
)
_FLAT = {
    "boolean": "boolean",
    "byte": "byte",
    "tinyint": "byte",
    "short": "short",
    "smallint": "short",
    "int": "integer",
    "integer": "integer",
    "long": "long",
    "bigint": "long",
    "float": "float",
    "real": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ltz": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
}
_DECIMALS = frozenset({"decimal", "dec", "numeric"})
_END = ("end", "")


def ddl_struct(text: str, what: str) -> dict[str, Any]:
    """Return the struct that a DDL text describes."""
    reader = _Reader(text, what)
    if re.match(r"\s*struct\s*<", text, re.IGNORECASE):
        struct: dict[str, Any] = reader.parse_type()
    else:
        struct = {"type": "struct", "fields": reader.parse_fields("end")}
    reader.expect("end")
    return struct


class _Reader:
    def __init__(self, text: str, what: str) -> None:
        self._text = text
        self._what = what
        self._tokens = list(self._split())
        self._at = 0

    def _split(self) -> Iterator[tuple[str, str]]:
        position = 0
        while self._text[position:].strip():
            match = _TOKEN.match(self._text, position)
            if match is None:
                raise self._make_error(f"{self._text[position:].strip()[:20]!r} is not understood")
            kind = str(match.lastgroup)
            yield ("text" if kind == "text2" else kind), match[kind]
            position = match.end()
        yield _END

    def _make_error(self, why: str) -> UsageError:
        return UsageError(
            f"{self._what} is not DDL that can be read without Spark, {self._text!r}: {why}. Write it like "
            "'user string, n bigint', or give a StructType"
        )

    def _next(self) -> tuple[str, str]:
        token = self._tokens[self._at]
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def _accept(self, *words: str) -> bool:
        """If the next tokens are these words or marks, consume them and return True."""
        ahead = self._tokens[self._at : self._at + len(words)]
        if [value.lower() for kind, value in ahead if kind in ("word", "mark")] != list(words):
            return False
        self._at += len(words)
        return True

    def expect(self, mark: str) -> None:
        """Consume a mark or the end; raise an error for anything else."""
        kind, value = self._next()
        if (kind if mark == "end" else value) != mark or kind in ("text", "quoted"):
            raise self._make_error(f"expected {mark!r}, not {value!r}" if value else f"{mark!r} is missing")

    def _expect_name(self) -> str:
        kind, value = self._next()
        if kind not in ("word", "quoted"):
            raise self._make_error(f"expected a name, not {value!r}" if value else "a name is missing")
        return value.replace("``", "`") if kind == "quoted" else value

    def parse_fields(self, end: str) -> list[dict[str, Any]]:
        """Parse columns up to the mark `end`, which is not consumed."""
        fields: list[dict[str, Any]] = []
        while True:
            name = self._expect_name()
            self._accept(":")
            field: dict[str, Any] = {"name": name, "type": self.parse_type(), "nullable": True, "metadata": {}}
            if self._accept("not", "null"):
                field["nullable"] = False
            if self._accept("comment"):
                kind, value = self._next()
                if kind != "text":
                    raise self._make_error("a comment must be a quoted text")
                field["metadata"] = {"comment": value}
            fields.append(field)
            if not self._accept(","):
                return fields

    def parse_type(self) -> Any:
        """Parse a type into its JSON form."""
        name = self._expect_name().lower()
        if name in _FLAT:
            return _FLAT[name]
        if name in _DECIMALS:
            return self._parse_decimal()
        if name == "array":
            self.expect("<")
            element = self.parse_type()
            self.expect(">")
            return {"type": "array", "elementType": element, "containsNull": True}
        if name == "map":
            self.expect("<")
            key = self.parse_type()
            self.expect(",")
            value = self.parse_type()
            self.expect(">")
            return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
        if name == "struct":
            self.expect("<")
            fields = [] if self._accept(">") else self.parse_fields(">")
            if fields:
                self.expect(">")
            return {"type": "struct", "fields": fields}
        if name in ("char", "varchar", "character"):
            raise UnsupportedTypeError(f"{self._what} has a {name}: use string, like Spark's Python types")
        raise self._make_error(f"{name!r} is not the name of a type that functions can have")

    def _parse_decimal(self) -> str:
        if not self._accept("("):
            return "decimal(10,0)"
        precision, scale = self._expect_name(), "0"
        if self._accept(","):
            scale = self._expect_name()
        self.expect(")")
        if not (precision.isdigit() and scale.isdigit()):
            raise self._make_error("decimal precision and scale must be integers")
        return f"decimal({int(precision)},{int(scale)})"
