"""The command savepoint transform: writes a savepoint's rows again with other columns or fewer keys."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from arrow_schemas.equality import BoolArray, rows_equal
from arrow_schemas.operator import OperatorFile
from arrow_schemas.row import EXPIRES_MS, RowSchema
from arrow_schemas.savepoint import CANONICAL, SavepointManifest
from spark_state_ext.cli.options import (
    NewSavepointPath,
    OperatorOption,
    SavepointPath,
    StorageOptions,
    make_json_option,
)
from spark_state_ext.cli.output import say, show_progress
from spark_state_ext.cli.paths import open_folder
from spark_state_ext.cli.values import parse_filter
from spark_state_ext.errors import StateValueError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.reading.columns import BUCKET, ShownColumns
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.saved_rows import choose_operator
from spark_state_ext.savepoints.writer import SavepointWriter, point_at_new

__all__ = ["Transformation", "cast_column", "change_operator", "transform", "write_transformed"]


def transform(
    path: SavepointPath,
    to: NewSavepointPath,
    operator: OperatorOption = None,
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD=NEW", help="rename a key or state column")] = None,
    drop: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="drop a state column")] = None,
    retype: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=TYPE", help="give a state column another Spark type, such as bigint"),
    ] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="FILTER", help="keep only keys that match the filter, such as: count > 10")
    ] = None,
    *,
    storage_options: StorageOptions,
    to_options: Annotated[dict[str, Any], make_json_option("the new savepoint")],
) -> None:
    """Write a new canonical savepoint with a savepoint's rows, but other columns or fewer keys, without Spark.

    Name columns as they are before the change. Batch, watermark, offsets, times to live and buckets stay the same.
    """
    source, target = open_folder(path, storage_options), open_folder(to, to_options)
    manifest = read_manifest(source)
    transformation = Transformation(
        choose_operator(manifest, operator, source.root),
        _parse_pairs(rename, "--rename"),
        tuple(drop or ()),
        _parse_pairs(retype, "--retype"),
        keep,
    )
    with show_progress("transforming", len(manifest.buckets)) as advance:
        rows, kept_count = write_transformed(source, manifest, target, transformation, advance)
    say(f"rows={rows} kept={kept_count} to={target.root}")


def _parse_pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not (sign and name and value):
            raise UsageError(f"{option} must be two names with = between them, not {text!r}")
        if name in pairs:
            raise UsageError(f"{option} names the column {name!r} twice")
        pairs[name] = value
    return pairs


# Names of types in Spark's JSON by those in Spark's SQL, if they differ.
_NAMES_IN_SQL = {
    "tinyint": "byte",
    "smallint": "short",
    "int": "integer",
    "bigint": "long",
    "real": "float",
    "timestamp_ltz": "timestamp",
}
_TYPES = {"byte", "short", "integer", "long", "float", "double", "string", "binary", "boolean", "date", "timestamp"}
_TYPES |= {"timestamp_ntz"}
_DECIMAL = re.compile(r"decimal\(\d+,\d+\)")
_ADVICE = "Choose another type, or exclude such keys with --keep."


@dataclass(frozen=True)
class Transformation:
    """What to change in the state of an operator."""

    # The operator. Other operators of the savepoint are compacted, and otherwise unchanged.
    operator: str
    # New names by the old ones.
    rename: Mapping[str, str]
    drop: tuple[str, ...]
    # New types of state columns, by their names in Spark's SQL.
    retype: Mapping[str, str]
    # A filter over the old columns; keys that do not match it are dropped. None keeps all keys.
    keep: str | None


# -- schemas --------------------------------------------------------------------------------------


def change_operator(operator: OperatorFile, transformation: Transformation) -> OperatorFile:
    """Return the operator file after a transformation."""
    keys, state = (json.loads(text) for text in (operator.key_schema, operator.state_schema))
    _check_columns(operator, keys["fields"], state["fields"], transformation)
    kept = [field for field in state["fields"] if field["name"] not in transformation.drop]
    for field in kept:
        if field["name"] in transformation.retype:
            field["type"] = _parse_type(transformation.retype[field["name"]])
    for field in (*keys["fields"], *kept):
        field["name"] = transformation.rename.get(field["name"], field["name"])
    for fields, what in ((keys["fields"], "key"), (kept, "state")):
        names = [field["name"] for field in fields]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise UsageError(f"there would be two {what} columns {duplicate!r}: choose another name")
    changed = replace(
        operator, key_schema=json.dumps(keys), state_schema=json.dumps({**state, "fields": kept}), schema_id=0
    )
    changed.row_schema()
    return changed


def _check_columns(operator: OperatorFile, keys: list[Any], state: list[Any], transformation: Transformation) -> None:
    key_names, names = (
        [field["name"] for field in keys],
        [field["name"] for field in state if field["name"] != EXPIRES_MS],
    )
    changes = [*transformation.rename, *transformation.drop, *transformation.retype]
    if operator.function is not None and changes:
        raise UsageError(
            f"operator {operator.operator!r} is the built-in {json.loads(operator.function)['name']}, whose columns "
            "cannot be changed: only --keep is allowed"
        )
    unknown = next((name for name in changes if name not in (*key_names, *names)), None)
    if unknown is not None:
        raise UsageError(f"there is no column {unknown!r}; there are {', '.join((*key_names, *names))}")
    for option, names_given in (("--drop", transformation.drop), ("--retype", tuple(transformation.retype))):
        key_column = next((name for name in names_given if name in key_names and name not in names), None)
        if key_column is not None:
            raise UsageError(
                f"{option} cannot name the key column {key_column!r}: it would change the hash by which keys are found"
            )
    ambiguous = next((name for name in changes if name in key_names and name in names), None)
    if ambiguous is not None:
        raise UsageError(f"{ambiguous!r} is ambiguous: it is a key column and a state column")
    if set(transformation.drop) >= set(names):
        raise UsageError("a state needs at least one column: not all of them can be dropped")
    if any(new == EXPIRES_MS for new in transformation.rename.values()):
        raise UsageError(f"{EXPIRES_MS!r} is reserved for the time when a row expires: choose another name")
    dropped = next(
        (name for name in transformation.drop if name in (*transformation.rename, *transformation.retype)), None
    )
    if dropped is not None:
        raise UsageError(f"column {dropped!r} is dropped, so it cannot be renamed or get another type")


def _parse_type(text: str) -> str:
    name = text.strip().lower().replace(" ", "")
    name = _NAMES_IN_SQL.get(name, name)
    if name not in _TYPES and not _DECIMAL.fullmatch(name):
        type_names = ", ".join(sorted({*_TYPES, *_NAMES_IN_SQL}))
        raise UsageError(f"{text!r} is not a type for --retype: choose {type_names}, or decimal(p,s)")
    return name


# -- rows -----------------------------------------------------------------------------------------


def write_transformed(
    source: Folder,
    manifest: SavepointManifest,
    target: Folder,
    transformation: Transformation,
    advance: Callable[[int], None] = lambda buckets: None,
) -> tuple[int, int]:
    """Write the new savepoint; return how many rows the operator had, and how many it has now."""
    operators = dict(manifest.header.operators)
    before = operators[transformation.operator]
    operators[transformation.operator] = after = change_operator(before, transformation)
    rows = _Rows(before.row_schema(), after.row_schema(), transformation)
    writer = SavepointWriter(source, manifest, target)
    for bucket in manifest.buckets:
        pointer, batches = bucket.pointer, writer.read(bucket)
        if bucket.operator == transformation.operator:
            text = f"{writer.id} {pointer.operator} {pointer.bucket}"
            checkpoint_id = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            pointer, batches = (
                point_at_new(replace(pointer, schema_id=0), checkpoint_id),
                rows.transform(batches),
            )
        writer.write(pointer, operators[bucket.operator].row_schema(), batches)
        advance(1)
    writer.finish(writer.changed_header(CANONICAL, operators))
    return rows.read_count, rows.kept_count


def cast_column(column: pa.Array, target_type: pa.DataType, name: str) -> pa.Array:
    """Convert a column to another type, and refuse it if a value would change: Arrow itself refuses only some."""
    if column.type == target_type:
        return column
    try:
        converted = column.cast(target_type)
        is_changed = (
            _find_infinite(column, converted) if pa.types.is_string(column.type) else _find_changed(column, converted)
        )
    except pa.ArrowException as error:
        raise StateValueError(f"column {name!r} cannot become {target_type}: {error}. {_ADVICE}") from error
    if is_changed.any():
        index = int(is_changed.argmax())
        raise StateValueError(
            f"column {name!r} cannot become {target_type}: its value {column[index]} would become {converted[index]}. "
            f"{_ADVICE}"
        )
    return converted


def _find_changed(column: pa.Array, converted: pa.Array) -> BoolArray:
    """Find the rows whose new value does not convert back to the old one."""
    return ~rows_equal([column], [converted.cast(column.type)])


def _find_infinite(text: pa.Array, converted: pa.Array) -> BoolArray:
    """Find the rows whose digits became infinite. A number has several texts, so it cannot be converted back."""
    if not pa.types.is_floating(converted.type):
        return np.zeros(len(text), dtype=np.bool_)
    became_infinite = pc.and_(pc.is_inf(converted), pc.match_substring_regex(text, "[0-9]")).fill_null(False)
    result: BoolArray = became_infinite.to_numpy(zero_copy_only=False)
    return result


class _Rows:
    """Transforms rows and counts them."""

    def __init__(self, before: RowSchema, after: RowSchema, transformation: Transformation) -> None:
        self.before, self.after = before, after
        self.read_count = self.kept_count = 0
        self._shown = ShownColumns(before)
        self._fields = pa.schema([field for field in self._shown.all if field.name != BUCKET])
        self._keep = None if transformation.keep is None else parse_filter(transformation.keep, self._fields)
        # The old column of each new state column.
        old_names = {new: old for old, new in transformation.rename.items()}
        self._sources = [f"state.{old_names.get(field.name, field.name)}" for field in after.state]

    def transform(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Transform the rows of a bucket, in order."""
        for batch in batches:
            self.read_count += batch.num_rows
            remaining = batch if self._keep is None else batch.filter(self._select_kept(batch, self._keep))
            if remaining.num_rows:
                self.kept_count += remaining.num_rows
                yield self._convert(remaining)

    def _select_kept(self, batch: pa.RecordBatch, keep: pc.Expression) -> pa.Array:
        shown = self._shown.of(batch, self._fields, -1)
        numbers = pa.array(np.arange(batch.num_rows))
        # An empty name cannot collide with a column's name.
        table = pa.Table.from_batches([shown]).append_column("", numbers)
        return pc.is_in(numbers, table.filter(keep).column("").combine_chunks())

    def _convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrow = self.after.arrow
        keys = len(self.before.keys)
        columns = list(batch.columns[: 1 + keys])
        for name, field in zip(self._sources, self.after.state, strict=True):
            column = batch.column(name)
            columns.append(cast_column(column, field.type, name.removeprefix("state.")))
        columns += [batch.column(name) for name in arrow.names[len(columns) :]]
        return pa.RecordBatch.from_arrays(columns, schema=arrow)
