"""The erase commands: keys, status, scan, withdraw and history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pyarrow as pa
import typer

from spark_state_ext.backends.registry import Backend
from spark_state_ext.cli.exit_codes import DONE, NO
from spark_state_ext.cli.options import (
    BackendOptions,
    BackendsOption,
    JsonKeys,
    KeyWords,
    LocalDirsOption,
    OperatorOption,
    OutputOption,
    QueryFolderOption,
    RootPath,
    SavepointsOption,
    StorageOptions,
)
from spark_state_ext.cli.output import Output, parse_columns, say, write_records, write_table
from spark_state_ext.cli.paths import list_operators, make_absolute
from spark_state_ext.cli.values import parse_key
from spark_state_ext.erasing.history import erase_history
from spark_state_ext.erasing.query_folders import find_query_folders
from spark_state_ext.erasing.receipt import EraseReceipt
from spark_state_ext.erasing.requests import WAITING, erase_keys, erase_status, withdraw_erasure
from spark_state_ext.erasing.scan import erase_scan
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.functions.conversion_errors import explain_conversion_error

__all__ = ["history", "keys", "scan", "status", "withdraw"]

_REQUEST_COLUMNS = parse_columns("operator, query_folder, number int, keys int")
_STATUS_COLUMNS = parse_columns(
    "operator, query_folder, number int, keys int, asked time_ms, state, done time_ms, batch int, kept bool"
)


@dataclass(frozen=True)
class _Operator:
    """An operator below a root; `root` is absolute and has no slash at its end."""

    root: str
    name: str
    storage_options: dict[str, Any]

    @classmethod
    def at(cls, root: str, operator: str | None, storage_options: dict[str, Any]) -> _Operator:
        """Return the named operator, or the only one of the root."""
        root = make_absolute(root)
        names = sorted(list_operators(Folder(root, storage_options), () if operator is None else (operator,)))
        if len(names) > 1:
            raise UsageError(f"{root} has {len(names)} operators: name one with --operator ({', '.join(names[:10])})")
        return cls(root, names[0], storage_options)

    def keys(self, query_folder: str | None, words: Sequence[str] | None, as_json: Sequence[str] | None) -> pa.Table:
        """Return the keys of a command line as a table with the operator's key columns."""
        fields = find_query_folders(self.root, self.name, query_folder, self.storage_options)[0].schema.keys
        schema = pa.schema([field.with_nullable(True).remove_metadata() for field in fields])
        described = ", ".join(f"{field.name} ({field.type})" for field in schema)
        if len(set(schema.names)) < len(schema.names):
            raise UsageError(
                f"two key columns have the same name ({described}): call the Python function with a table instead"
            )
        words, as_json = words or (), as_json or ()
        if not (words or as_json):
            raise UsageError(f"give a key, as words or with --json; its columns are {described}")
        if len(words) % len(schema):
            raise UsageError(
                f"a key has the columns {described}, one word each: {len(words)} words are not a whole number of keys"
            )
        keys = [parse_key(words[at : at + len(schema)], None, schema) for at in range(0, len(words), len(schema))]
        keys += [parse_key((), text, schema) for text in as_json]
        try:
            return pa.Table.from_pylist(keys, schema=schema)
        except (pa.ArrowException, ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"the keys do not fit the columns {described}: {explain_conversion_error(error)}"
            ) from error


# -- keys, status, withdraw -----------------------------------------------------------------------


def keys(
    root: RootPath,
    keys: KeyWords = None,
    as_json: JsonKeys = None,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Ask a query to erase keys from an operator's state. The query does so in its next batch.

    Without --query-folder the request goes to all query folders of the operator. Older files still hold the keys: see
    erase history. Keys are written as for get; put -- before a key that starts with a dash.
    """
    target = _Operator.at(root, operator, storage_options)
    key_table = target.keys(query_folder, keys, as_json)
    requests = erase_keys(
        target.root, key_table, operator=target.name, query_folder=query_folder, storage_options=storage_options
    )
    write_records(map(vars, requests), _REQUEST_COLUMNS, output)
    say(
        "a query with erase_requests=True erases the keys in its next batch with data; with any other query the "
        "request waits. erase status shows when it is done"
    )


def status(
    root: RootPath,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the state of an operator's erase requests. Exits with 1 while a request is waiting.

    The column kept is true while the request, which contains the keys, still exists.
    """
    target = _Operator.at(root, operator, storage_options)
    requests = erase_status(
        target.root, operator=target.name, query_folder=query_folder, storage_options=storage_options
    )
    rows = [{**vars(request), "asked": request.asked_ms, "done": request.done_ms} for request in requests]
    write_records(rows, _STATUS_COLUMNS, output, if_empty=False)
    waiting = sum(request.state == WAITING for request in requests)
    say(f"requests={len(requests)} waiting={waiting}")
    raise typer.Exit(NO if waiting else DONE)


def withdraw(
    root: RootPath,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="number of the request, as erase status prints it")],
    operator: OperatorOption = None,
    query_folder: Annotated[
        str | None, typer.Option("--query-folder", metavar="NAME", help="needed if the operator has several")
    ] = None,
    *,
    storage_options: StorageOptions,
) -> None:
    """Withdraw an erase request that was a mistake, or that cannot be read. The query skips it in its next batch.

    Buckets that have already erased its keys do not get them back. The number stays in use, for an empty request.
    """
    target = _Operator.at(root, operator, storage_options)
    withdraw_erasure(
        target.root, number, operator=target.name, query_folder=query_folder, storage_options=storage_options
    )
    say(f"request {number} of operator {target.name} is withdrawn: it is empty now, and is done after the next batches")


# -- scan, history --------------------------------------------------------------------------------


def scan(
    root: RootPath,
    keys: KeyWords = None,
    as_json: JsonKeys = None,
    operator: OperatorOption = None,
    backend: BackendsOption = None,
    savepoint: SavepointsOption = None,
    local_dir: LocalDirsOption = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="LOCATION", help="the query's checkpointLocation; its state is counted")
    ] = None,
    *,
    storage_options: StorageOptions,
    backend_options: BackendOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Search for keys, and print a receipt: what holds a key, what was searched, and what is out of reach.

    Reads every file and changes none. Exits with 1 if a key was found or a file could not be read. The receipt does not
    contain the keys. Keys are written as for get; put -- before a key that starts with a dash.
    """
    target = _Operator.at(root, operator, storage_options)
    receipt = erase_scan(
        target.root,
        target.keys(None, keys, as_json),
        operator=target.name,
        storage_options=storage_options,
        backends=_build_backends(backend, backend_options),
        savepoints=savepoint or (),
        local_dirs=local_dir or (),
        checkpoint_location=checkpoint,
    )
    raise typer.Exit(_write_receipt(receipt, output))


def history(
    root: RootPath,
    keys: KeyWords = None,
    as_json: JsonKeys = None,
    yes: Annotated[bool, typer.Option("--yes", help="rewrite the files; this cannot be undone")] = False,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    backend: BackendsOption = None,
    local_dir: LocalDirsOption = None,
    inline_batches: Annotated[
        int, typer.Option(min=0, metavar="N", help="the largest recent minBatchesToRetain; 0 if no deltas are inline")
    ] = 100,
    savepoint: SavepointsOption = None,
    savepoints: Annotated[
        bool, typer.Option("--savepoints", help="rewrite those savepoints too; without it they are not changed")
    ] = False,
    *,
    storage_options: StorageOptions,
    backend_options: BackendOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Erase keys from all checkpoint files of a stopped query, and print the receipt of a scan.

    Name all other backends of the query. Needs --yes. Exits with 1 if a key is still somewhere, such as in a savepoint:
    savepoints are changed only with --savepoints. If it is interrupted, run it again. Keys are written as for get; put
    -- before a key that starts with a dash.
    """
    if savepoints and not savepoint:
        raise UsageError("--savepoints rewrites the savepoints that you name with --savepoint: name at least one")
    target = _Operator.at(root, operator, storage_options)
    key_table = target.keys(query_folder, keys, as_json)
    if not yes:
        too = f" and {len(savepoint or ())} savepoints" if savepoints else ""
        raise UsageError(
            f"this rewrites the checkpoint files of {target.name!r} below {target.root}{too} without "
            f"{key_table.num_rows} keys, and cannot be undone: look first with erase scan, then give --yes"
        )
    result = erase_history(
        target.root,
        key_table,
        operator=target.name,
        query_folder=query_folder,
        storage_options=storage_options,
        backends=_build_backends(backend, backend_options),
        local_dirs=local_dir or (),
        inline_batches=inline_batches,
        savepoints=savepoint or (),
        write_savepoints=savepoints,
    )
    for savepoint_path in result.savepoints_with_keys:
        say(
            f"the savepoint at {savepoint_path} has a key: rewrite it with --savepoint {savepoint_path} --savepoints, "
            "or delete it"
        )
    code = _write_receipt(result.receipt, output)
    say(
        f"written_anew={result.files} rows={result.rows} requests={result.requests} stores={result.stores} "
        f"savepoints={result.savepoints}"
    )
    raise typer.Exit(code)


def _build_backends(roots: Sequence[str] | None, options: dict[str, Any]) -> list[Backend]:
    return [Backend(root, storage_options=options) for root in roots or ()]


def _write_receipt(receipt: EraseReceipt, output: Output) -> int:
    """Print a receipt, places with a key first; return the exit code."""
    write_table(receipt.to_table(), output)
    file_count = sum(place.files for place in receipt.scanned)
    say(
        f"operator={receipt.operator} keys={receipt.keys} by_rows_only={receipt.keys_by_rows_only} "
        f"files={file_count} found={len(receipt.found)} out_of_reach={len(receipt.out_of_reach)}"
    )
    return DONE if receipt.absent else NO
