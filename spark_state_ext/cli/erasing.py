"""Keys that somebody names on a command line to have them erased, and the receipt that he gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pyarrow as pa
import typer

from spark_state_ext.backends.registry import Backend
from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.output import Output, say, write_table
from spark_state_ext.cli.parameters import options_for, options_of
from spark_state_ext.cli.roots import operators_below
from spark_state_ext.cli.targets import absolute
from spark_state_ext.cli.values import key_of
from spark_state_ext.erasing.folders import query_folders_below
from spark_state_ext.erasing.receipt import EraseReceipt
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.functions.reasons import conversion_reason

__all__ = [
    "BackendOptions",
    "BackendsOption",
    "JsonKeys",
    "KeyWords",
    "LocalDirsOption",
    "RootPath",
    "backends_of",
    "keys_of",
    "operator_at",
    "write_receipt",
]

RootPath = Annotated[str, typer.Argument(metavar="ROOT", help="as ArrowState has it: an absolute path or a URL")]
KeyWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY]...", help="keys, one after the other: of each a word for each key column"),
]
JsonKeys = Annotated[
    list[str] | None, typer.Option("--json", metavar="JSON", help="a key as an object, which may have nulls")
]
BackendsOption = Annotated[
    list[str] | None, typer.Option("--backend", metavar="ROOT", help="root of another backend of the query")
]
BackendOptions = Annotated[
    str,
    options_for("backends", "--backend-options"),
]
LocalDirsOption = Annotated[
    list[str] | None, typer.Option("--local-dir", metavar="FOLDER", help="local_dir of the ArrowState, on this machine")
]


def operator_at(root: str, operator: str | None, storage_options: Mapping[str, Any]) -> tuple[str, str]:
    """A root, absolute and without a slash at its end, and the operator that is meant."""
    root = absolute(root)
    found = sorted(operators_below(Folder(root, storage_options), () if operator is None else (operator,)))
    if len(found) > 1:
        raise UsageError(f"{root} has {len(found)} operators: name one with --operator ({', '.join(found[:10])})")
    return root, found[0]


def keys_of(
    root: str,
    operator: str,
    query_folder: str | None,
    words: Sequence[str] | None,
    as_json: Sequence[str] | None,
    storage_options: Mapping[str, Any],
) -> pa.Table:
    """The keys that were named, by an operator's key columns."""
    fields = query_folders_below(root, operator, query_folder, storage_options)[0].schema.keys
    schema = pa.schema([field.with_nullable(True).remove_metadata() for field in fields])
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    if len(set(schema.names)) < len(schema.names):
        raise UsageError(f"two key columns have one name ({columns}): use the function of Python, with a table")
    words, as_json = words or (), as_json or ()
    if not (words or as_json):
        raise UsageError(f"name a key, as words or as --json; its columns are {columns}")
    if len(words) % len(schema):
        raise UsageError(f"a key has the columns {columns}, and {len(words)} words are no whole number of keys")
    given = [key_of(words[at : at + len(schema)], None, schema) for at in range(0, len(words), len(schema))]
    given += [key_of((), text, schema) for text in as_json]
    try:
        return pa.Table.from_pylist(given, schema=schema)
    except (pa.ArrowException, ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"these are no keys with the columns {columns}: {conversion_reason(error)}") from error


def backends_of(roots: Sequence[str] | None, options: str) -> list[Backend]:
    """Backends by their roots, all with the same options of fsspec."""
    return [Backend(root, storage_options=options_of(options)) for root in roots or ()]


def write_receipt(receipt: EraseReceipt, output: Output) -> int:
    """Print a receipt, what has a key first; gives the exit code."""
    write_table(receipt.to_table(), output)
    looked_at = sum(it.files for it in receipt.scanned)
    say(
        f"operator={receipt.operator} keys={receipt.keys} by_rows_only={receipt.keys_by_rows_only} "
        f"files={looked_at} found={len(receipt.found)} out_of_reach={len(receipt.out_of_reach)}"
    )
    return DONE if receipt.absent else NO
