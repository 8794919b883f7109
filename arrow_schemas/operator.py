"""``operator_<n>.json``: what all buckets of an operator have in common.

A file is immutable and byte-identical from every writer: whichever task of the first batch writes it first, the other
tasks find what they would have written. If the state schema changes in a way that old rows can follow, a file with the
next number is written; rows keep the number they were written under.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from arrow_schemas.bucket_map import BUCKETS_MAX, HASH, PARTITION, BucketMap
from arrow_schemas.checksum import compute_checksum, read_whole_number
from arrow_schemas.damage import describe_damage
from arrow_schemas.errors import (
    BucketCountChangedError,
    BucketMapChangedError,
    CorruptFileError,
    FunctionChangedError,
    SchemaChangedError,
    StateError,
    VersionSkewError,
)
from arrow_schemas.evolution import check_state_change
from arrow_schemas.row import EXPIRES_MS, RowSchema
from arrow_schemas.spark_types import key_fields, state_fields

__all__ = [
    "EXPRESSION",
    "HASH_NAME",
    "MAPPED_NAME",
    "OPERATOR_FORMAT",
    "OperatorFile",
    "is_operator_name",
    "operator_file_name",
    "parse_operator_file_name",
    "with_expiry",
]

# Format 3 has a bucket map other than equal ranges, format 2 has a built-in operator's parameters, and format 1 has
# neither; the oldest format that can hold the contents is written.
OPERATOR_FORMAT = 3
_FORMAT_1, _FORMAT_2 = 1, 2
# Spark's xxhash64 with its seed of 42 over the normalised keys; bucket = (high 32 bits * buckets) >> 32.
HASH_NAME = "spark-xxhash64-42/high32-multiply"
# The same hash, but the field `bucket_map` decides the bucket. Releases that do not know the field refuse this name.
MAPPED_NAME = "spark-xxhash64-42/bucket-map"
# Stands for a column in a parameter if the column is an expression and not just a name.
EXPRESSION = "an expression"
_NAME = re.compile(r"operator_(0|[1-9][0-9]{0,8})\.json")
_SCHEMA_ID_MAX = 10**9 - 1
# An operator's name becomes the name of a folder, so it must not lead out of the folder above.
_OPERATOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_operator_name(name: object) -> bool:
    """True for 1 to 100 letters, digits, '.', '_' and '-' that start with a letter or digit."""
    return isinstance(name, str) and _OPERATOR_NAME.fullmatch(name) is not None


def with_expiry(state_schema: str) -> str:
    """Return a state schema with the hidden column for a time to live appended."""
    parsed = json.loads(state_schema)
    hidden = {"name": EXPIRES_MS, "type": "long", "nullable": True, "metadata": {}}
    return json.dumps({**parsed, "fields": [*parsed["fields"], hidden]})


def operator_file_name(schema_id: int) -> str:
    """Return the name of operator file number `schema_id`."""
    return f"operator_{schema_id}.json"


def parse_operator_file_name(name: str) -> int | None:
    """Return the number of an operator file with that name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class OperatorFile:
    """Contents of one operator file.

    Parameters
    ----------
    operator, query_id
        Name of the operator, and id of the streaming query that owns the state.
    buckets
        Number of buckets; the label of bucket *i* is the integer whose Spark hash is *i* (`labels`).
    key_schema, state_schema
        `StructType.json()` of the grouping and of the state columns.
    schema_id
        Number of this file.
    function
        A built-in operator's name and the parameters that its state depends on, apart from its schema, as JSON:
        ``{"name": …, "parameters": {name: value}}``. None: the function is the user's own, or an older release wrote
        the file.
    mapped
        The bucket map, unless it is equal ranges of the key's hash; then None.
    """

    operator: str
    query_id: str
    buckets: int
    key_schema: str
    state_schema: str
    schema_id: int = 0
    function: str | None = None
    mapped: BucketMap | None = None

    def __post_init__(self) -> None:
        if self.mapped is not None and (self.mapped.kind == HASH or self.mapped.buckets != self.buckets):
            raise CorruptFileError(f"operator {self.operator!r} with {self.buckets} buckets cannot have {self.mapped}")

    @property
    def bucket_map(self) -> BucketMap:
        """The bucket map, which says which bucket a row belongs to."""
        return self.mapped or BucketMap(self.buckets)

    def row_schema(self) -> RowSchema:
        """Return the schema of rows written under this file."""
        return RowSchema(key_fields(self.key_schema), state_fields(self.state_schema))

    def with_expiry(self) -> OperatorFile:
        """Return this file with the hidden column for a time to live appended to the state's."""
        return replace(self, state_schema=with_expiry(self.state_schema))

    def with_map(self, bucket_map: BucketMap) -> OperatorFile:
        """Return this file with another bucket map."""
        return replace(self, buckets=bucket_map.buckets, mapped=None if bucket_map.kind == HASH else bucket_map)

    def encode(self) -> bytes:
        """Return the file's bytes; equal contents give equal bytes."""
        fields = {
            "format": _FORMAT_1 if self.function is None else _FORMAT_2,
            "operator": self.operator,
            "query_id": self.query_id,
            "buckets": self.buckets,
            "labels": "murmur3-42-inverse",
            "hash": HASH_NAME,
            "key_schema": json.loads(self.key_schema),
            "state_schema": json.loads(self.state_schema),
            "schema_id": self.schema_id,
        }
        if self.function is not None:
            fields["function"] = json.loads(self.function)
        if self.mapped is not None:
            fields |= {"format": OPERATOR_FORMAT, "hash": MAPPED_NAME, "bucket_map": self.mapped.to_plain()}
        fields["checksum"] = compute_checksum(fields)
        return json.dumps(fields, sort_keys=True, indent=1).encode() + b"\n"

    @staticmethod
    def decode(data: bytes, where: str) -> OperatorFile:
        """Decode an operator file.

        Raises
        ------
        CorruptFileError
            If it is damaged.
        VersionSkewError
            If a newer release wrote it.
        """
        try:
            fields = json.loads(data)
            checksum = fields.pop("checksum")
            written = read_whole_number(fields, "format", 1, 10**99)
            name = MAPPED_NAME if written == OPERATOR_FORMAT else HASH_NAME
            if written > OPERATOR_FORMAT or fields["hash"] != name:
                raise VersionSkewError(
                    f"{where} has format {written} and hash {fields['hash']!r}; this release reads format "
                    f"{OPERATOR_FORMAT} with {MAPPED_NAME!r} and older formats with {HASH_NAME!r}. Use a newer release."
                )
            if checksum != compute_checksum(fields):
                raise CorruptFileError(f"{where} fails its checksum")
            if not is_operator_name(fields["operator"]):
                raise CorruptFileError(
                    f"{where} names the operator {fields['operator']!r}, which is not a valid operator name: do not "
                    "use this file"
                )
            return OperatorFile(
                operator=fields["operator"],
                query_id=fields["query_id"],
                buckets=read_whole_number(fields, "buckets", 1, BUCKETS_MAX),
                key_schema=json.dumps(fields["key_schema"]),
                state_schema=json.dumps(fields["state_schema"]),
                schema_id=read_whole_number(fields, "schema_id", 0, _SCHEMA_ID_MAX),
                function=_encode_function(fields.get("function")),
                mapped=BucketMap.from_plain(fields["bucket_map"]) if written == OPERATOR_FORMAT else None,
            )
        except StateError:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise CorruptFileError(f"{where} is not an operator file: {describe_damage(error)}") from error

    def succeeded_by(
        self, requested: OperatorFile, *, case_sensitive: bool = False, leave_behind: bool = False
    ) -> OperatorFile:
        """Return the operator file to use if a job asks for `requested` and the newest stored file is this one.

        Parameters
        ----------
        requested
            The operator file that the job asks for.
        case_sensitive
            True if Spark treats names that differ only in case as different. Otherwise a key's case may change.
        leave_behind
            True if state columns that the job does not have are dropped.

        Returns
        -------
        OperatorFile
            This file if it still fits; otherwise `requested` with the next number.

        Raises
        ------
        BucketCountChangedError, BucketMapChangedError, SchemaChangedError, FunctionChangedError
            If the job cannot use the stored rows; the message says which column or parameter is the cause, and why.
        """
        self.refuse_other_map(requested.bucket_map)
        kept = self._drop_extra_columns(requested) if leave_behind else self
        stored, asked = kept.row_schema(), requested.row_schema()
        if stored.expires and not asked.expires:
            # The job no longer has a time to live, but the rows keep the column for it.
            requested = requested.with_expiry()
            asked = requested.row_schema()
        _check_keys(self.operator, stored.keys, asked.keys, case_sensitive)
        # Before the state: another function mostly has another state too, and this check's message says more.
        _check_function(self.operator, self.function, requested.function)
        changed = check_state_change(self.operator, stored.state, asked.state)
        # Functions see the keys under the names that the job asks for.
        changed |= [field.name for field in stored.keys] != [field.name for field in asked.keys]
        changed |= kept.state_schema != self.state_schema
        return replace(requested, schema_id=self.schema_id + 1) if changed else self

    def refuse_other_map(self, asked: BucketMap) -> None:
        """Refuse a job that has another bucket map.

        Parameters
        ----------
        asked
            The job's bucket map.

        Raises
        ------
        BucketCountChangedError, BucketMapChangedError
            If the maps differ; the message says which argument to give.
        """
        _check_map(self.operator, self.bucket_map, asked)

    def begins(
        self, requested: OperatorFile, *, leave_behind: bool = False, case_sensitive: bool = False
    ) -> OperatorFile:
        """Return the first operator file of a query that begins with state which was written under this file.

        Parameters
        ----------
        requested
            The operator file that the job asks for, which may give the operator another name.
        leave_behind
            True if state columns that the job does not have are dropped.
        case_sensitive
            As for `succeeded_by`.

        Returns
        -------
        OperatorFile
            The file, with number 0.

        Raises
        ------
        BucketCountChangedError, BucketMapChangedError, SchemaChangedError, FunctionChangedError
            If the job cannot use the stored rows; the message says which column or parameter is the cause, and why.
        """
        saved = replace(self, operator=requested.operator, query_id=requested.query_id, schema_id=0)
        in_force = saved.succeeded_by(requested, case_sensitive=case_sensitive, leave_behind=leave_behind)
        # Keep the known built-in operator if the job does not name one.
        return replace(in_force, schema_id=0, function=in_force.function or saved.function)

    def _drop_extra_columns(self, requested: OperatorFile) -> OperatorFile:
        """Return this file without state columns that `requested` does not have; the one for a time to live stays."""
        names = {field["name"] for field in json.loads(requested.state_schema)["fields"]} | {EXPIRES_MS}
        parsed = json.loads(self.state_schema)
        kept = [field for field in parsed["fields"] if field["name"] in names]
        if len(kept) == len(parsed["fields"]):
            return self
        return replace(self, state_schema=json.dumps({**parsed, "fields": kept}))


def _encode_function(builtin: Any) -> str | None:
    """Check a built-in operator that was read from a file, and return it as JSON."""
    if builtin is None:
        return None
    if not isinstance(builtin["name"], str) or not isinstance(builtin["parameters"], dict):
        raise TypeError(f"not a function: {builtin!r}")
    return json.dumps(builtin, sort_keys=True)


def _check_map(operator: str, stored: BucketMap, asked: BucketMap) -> None:
    if stored == asked:
        return
    if stored.kind == asked.kind == HASH:
        raise BucketCountChangedError(
            f"operator {operator!r} has its state in {stored.buckets} buckets and the job asks for {asked.buckets}: "
            f"set buckets={stored.buckets}, or start from a new checkpoint location."
        )
    if stored.kind == asked.kind == PARTITION:
        raise BucketMapChangedError(
            f"operator {operator!r} has its state in buckets by source partition, and "
            f"{_describe_other_partitions(stored, asked)}, or start from a new checkpoint location."
        )
    mend = "rescale the query with rescale=<its checkpointLocation>, " if stored.by_hash and asked.by_hash else ""
    raise BucketMapChangedError(
        f"operator {operator!r} has its state in {stored} and the job asks for {asked}"
        f"{' with other bounds' if str(stored) == str(asked) else ''}: give {stored.argument}, {mend}or start "
        "from a new checkpoint location."
    )


def _describe_other_partitions(stored: BucketMap, asked: BucketMap) -> str:
    """Say what differs between two maps by partition, and which argument to give."""
    before, after = dict(stored.streams), dict(asked.streams)
    if before.keys() != after.keys():
        names = [", ".join(group) or "unnamed" for group in (filter(None, before), filter(None, after))]
        return f"its streams were {names[0]} and are now {names[1]}: give the old streams"
    if stored.group_by != asked.group_by:
        return (
            f"partitions are grouped by {stored.group_by!r}, not {asked.group_by!r}: give group_by={stored.group_by!r}"
        )
    stream = next(name for name in before if before[name] != after[name])
    was, now, which = before[stream], after[stream], f" of stream {stream!r}" if stream else ""
    began = f"the state began with {was} partitions{which} and the plan says {now}"
    if now > was and now % was == 0:
        return f"{began}: give counts=[{was}, {now}]{which}, if the source has grown since"
    return f"{began}: give a list for counts{which} that begins with {was}"


def _check_function(operator: str, stored: str | None, asked: str | None) -> None:
    if stored is None or asked is None:
        return
    before, after = json.loads(stored), json.loads(asked)
    if before["name"] != after["name"]:
        detail = f"it was {before['name']} and is now {after['name']}"
    else:
        # Only parameters in both are compared: a new aggregate is a new parameter, and a removed one is reported as a
        # removed state column.
        changed = [
            f"{name!r} was {was} and is now {after['parameters'][name]}"
            for name, was in before["parameters"].items()
            if name in after["parameters"] and after["parameters"][name] != was
        ]
        if not changed:
            return
        detail = f"of {before['name']}, {', '.join(changed)}"
        if EXPRESSION in detail:
            detail += " (only a plain column, 'v' or F.col('v'), is shown by its name)"
    raise FunctionChangedError(
        f"operator {operator!r} changed: {detail}. Its state was made with the old function and does not fit the new "
        "one: go back to the old function, add a new aggregate under a name of its own, or start from a new checkpoint "
        "location."
    )


def _check_keys(operator: str, stored: tuple[pa.Field, ...], asked: tuple[pa.Field, ...], case_sensitive: bool) -> None:
    before = [(field.name if case_sensitive else field.name.lower(), field.type) for field in stored]
    after = [(field.name if case_sensitive else field.name.lower(), field.type) for field in asked]
    if before == after:
        return
    detail = f"it had {len(before)} columns and now has {len(after)}"
    for old, new, was, now in zip(stored, asked, before, after, strict=False):
        if was[0] != now[0]:
            detail = f"column {old.name!r} is now {new.name!r}"
            break
        if old.type != new.type:
            detail = f"column {old.name!r} was {old.type} and is now {new.type}"
            break
    raise SchemaChangedError(
        f"the key of operator {operator!r} changed: {detail}. State is found by the hash of its key, so the key cannot "
        "change: group by the old columns, or start from a new checkpoint location."
    )
