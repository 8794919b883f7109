"""``erase keys``: ask a query to take keys out of its state."""

from __future__ import annotations

import pyarrow as pa

from spark_state_ext.cli.erasing import JsonKeys, KeyWords, RootPath, keys_of, operator_at
from spark_state_ext.cli.opening import OperatorOption, QueryFolderOption
from spark_state_ext.cli.output import Output, say, table_of, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.erasing.asking import erase_keys

__all__ = ["command"]

_ROWS = pa.schema(
    [("operator", pa.string()), ("query_folder", pa.string()), ("number", pa.int64()), ("keys", pa.int64())]
)


def command(
    root: RootPath,
    keys: KeyWords = None,
    as_json: JsonKeys = None,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Ask for keys to be erased from an operator's state. The query does so in its next batch.

    Without --query-folder all query folders of the operator are asked. Older files hold the keys for longer: see erase
    history. Words are as get takes them; before one that begins with a dash write --.
    """
    options = options_of(storage_options)
    root, operator = operator_at(root, operator, options)
    wanted = keys_of(root, operator, query_folder, keys, as_json, options)
    asked = erase_keys(root, wanted, operator=operator, query_folder=query_folder, storage_options=options)
    write_table(table_of([vars(it) for it in asked], _ROWS), output)
    say(
        "a query with erase_requests=True carries it out in its next batch with data, any other lets it wait: erase "
        "status tells when it is done"
    )
