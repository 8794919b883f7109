"""``show``: which state there is at a path, and which batches of it can be read."""

from __future__ import annotations

import pyarrow as pa

from spark_state_ext.cli.opening import (
    AtOption,
    CheckpointOption,
    HoldOption,
    OperatorOption,
    QueryFolderOption,
    StatePath,
    UnprovenOption,
    opened,
)
from spark_state_ext.cli.output import Output, write_record
from spark_state_ext.cli.parameters import OutputOption, StorageOptions

__all__ = ["command"]

_COLUMN = pa.struct([("column", pa.string()), ("type", pa.string()), ("role", pa.string())])
_RECORD = pa.schema(
    [
        ("path", pa.string()),
        ("operator", pa.string()),
        ("query", pa.string()),
        ("buckets", pa.int64()),
        ("unit", pa.string()),
        ("batch", pa.int64()),
        ("oldest_batch", pa.int64()),
        ("newest_batch", pa.int64()),
        ("begun_batch", pa.int64()),
        ("proven", pa.bool_()),
        ("columns", pa.list_(_COLUMN)),
    ]
)


def command(
    path: StatePath,
    at: AtOption = None,
    checkpoint: CheckpointOption = None,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    unproven: UnprovenOption = False,
    hold: HoldOption = True,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Say which state there is at a path, its columns, and which batches of it can be read."""
    with opened(path, at, operator, query_folder, unproven, hold, storage_options, checkpoint) as state:
        columns = [("key", it) for it in state.key_schema] + [("state", it) for it in state.state_schema]
        write_record(
            {
                "path": state.path,
                "operator": state.operator,
                "query": state.query_id or None,
                "buckets": state.buckets,
                "unit": state.unit,
                "batch": state.batch,
                "oldest_batch": state.oldest_batch,
                "newest_batch": state.newest_batch,
                "begun_batch": state.begun_batch,
                "proven": state.proven,
                "columns": [{"column": it.name, "type": str(it.type), "role": role} for role, it in columns],
            },
            _RECORD,
            output,
        )
