"""Erase: keys, status, scan, withdraw and history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pyarrow as pa
import typer

from spark_state_ext.backends.registry import Backend
from spark_state_ext.cli.exits import DONE, NO
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
from spark_state_ext.erasing.asking import WAITING, erase_keys, erase_status, withdraw_erasure
from spark_state_ext.erasing.folders import query_folders_below
from spark_state_ext.erasing.history import erase_history
from spark_state_ext.erasing.receipt import EraseReceipt
from spark_state_ext.erasing.scanning import erase_scan
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.functions.reasons import conversion_reason

__all__ = ["history", "keys", "scan", "status", "withdraw"]

_ASKED = parse_columns("operator, query_folder, number int, keys int")
_STATUS = parse_columns(
    "operator, query_folder, number int, keys int, asked time_ms, state, done time_ms, batch int, kept bool"
)


@dataclass(frozen=True)
class _Operator:
    """An operator below a root, absolute and without a slash at its end."""

    root: str
    name: str
    storage_options: dict[str, Any]

    @classmethod
    def at(cls, root: str, operator: str | None, storage_options: dict[str, Any]) -> _Operator:
        """Find the operator that is meant."""
        root = make_absolute(root)
        there = sorted(list_operators(Folder(root, storage_options), () if operator is None else (operator,)))
        if len(there) > 1:
            raise UsageError(f"{root} has {len(there)} operators: name one with --operator ({', '.join(there[:10])})")
        return cls(root, there[0], storage_options)

    def keys(self, query_folder: str | None, words: Sequence[str] | None, as_json: Sequence[str] | None) -> pa.Table:
        """The keys that were named, by the operator's key columns."""
        fields = query_folders_below(self.root, self.name, query_folder, self.storage_options)[0].schema.keys
        schema = pa.schema([field.with_nullable(True).remove_metadata() for field in fields])
        described = ", ".join(f"{field.name} ({field.type})" for field in schema)
        if len(set(schema.names)) < len(schema.names):
            raise UsageError(f"two key columns have one name ({described}): use the function of Python, with a table")
        words, as_json = words or (), as_json or ()
        if not (words or as_json):
            raise UsageError(f"name a key, as words or as --json; its columns are {described}")
        if len(words) % len(schema):
            raise UsageError(f"a key has the columns {described}, and {len(words)} words are no whole number of keys")
        given = [parse_key(words[at : at + len(schema)], None, schema) for at in range(0, len(words), len(schema))]
        given += [parse_key((), text, schema) for text in as_json]
        try:
            return pa.Table.from_pylist(given, schema=schema)
        except (pa.ArrowException, ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise UsageError(f"these are no keys with the columns {described}: {conversion_reason(error)}") from error


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
    """Ask for keys to be erased from an operator's state. The query does so in its next batch.

    Without --query-folder all query folders of the operator are asked. Older files hold the keys for longer: see erase
    history. Words are as get takes them; before one that begins with a dash write --.
    """
    meant = _Operator.at(root, operator, storage_options)
    wanted = meant.keys(query_folder, keys, as_json)
    asked = erase_keys(
        meant.root, wanted, operator=meant.name, query_folder=query_folder, storage_options=storage_options
    )
    write_records(map(vars, asked), _ASKED, output)
    say(
        "a query with erase_requests=True carries it out in its next batch with data, any other lets it wait: erase "
        "status tells when it is done"
    )


def status(
    root: RootPath,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what has become of an operator's erase requests; exits with 1 while one of them waits.

    kept says whether the request, which holds the keys, is there still.
    """
    meant = _Operator.at(root, operator, storage_options)
    requests = erase_status(meant.root, operator=meant.name, query_folder=query_folder, storage_options=storage_options)
    rows = [{**vars(it), "asked": it.asked_ms, "done": it.done_ms} for it in requests]
    write_records(rows, _STATUS, output, if_none=False)
    waiting = sum(it.state == WAITING for it in requests)
    say(f"requests={len(requests)} waiting={waiting}")
    raise typer.Exit(NO if waiting else DONE)


def withdraw(
    root: RootPath,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="of the request, as erase status prints it")],
    operator: OperatorOption = None,
    query_folder: Annotated[
        str | None, typer.Option("--query-folder", metavar="NAME", help="needed if the operator has several")
    ] = None,
    *,
    storage_options: StorageOptions,
) -> None:
    """Withdraw an erase request that was a mistake, or that cannot be read. The query skips it in its next batch.

    Buckets that have erased its keys already stay without them. The number stays in use, with no key.
    """
    meant = _Operator.at(root, operator, storage_options)
    withdraw_erasure(
        meant.root, number, operator=meant.name, query_folder=query_folder, storage_options=storage_options
    )
    say(f"request {number} of operator {meant.name} is withdrawn: it names no key, and is done after the next batches")


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
        str | None, typer.Option(metavar="LOCATION", help="the query's checkpointLocation, whose state is counted")
    ] = None,
    *,
    storage_options: StorageOptions,
    backend_options: BackendOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Look for what holds keys, and print a receipt: what has one, what was looked at, and what is out of reach.

    Reads every file, and changes nothing. Exits with 1 where something has a key. The receipt names no key. Words are
    as get takes them; before one that begins with a dash write --.
    """
    meant = _Operator.at(root, operator, storage_options)
    receipt = erase_scan(
        meant.root,
        meant.keys(None, keys, as_json),
        operator=meant.name,
        storage_options=storage_options,
        backends=_backends(backend, backend_options),
        savepoints=savepoint or (),
        local_dirs=local_dir or (),
        checkpoint_location=checkpoint,
    )
    raise typer.Exit(_write_receipt(receipt, output))


def history(
    root: RootPath,
    keys: KeyWords = None,
    as_json: JsonKeys = None,
    yes: Annotated[bool, typer.Option("--yes", help="do it: files are written anew, and nobody can undo it")] = False,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    backend: BackendsOption = None,
    local_dir: LocalDirsOption = None,
    inline_batches: Annotated[
        int, typer.Option(min=0, metavar="N", help="the largest minBatchesToRetain lately; 0: nothing is kept inline")
    ] = 100,
    savepoint: SavepointsOption = None,
    savepoints: Annotated[
        bool, typer.Option("--savepoints", help="write those savepoints anew, too: else they are not touched")
    ] = False,
    *,
    storage_options: StorageOptions,
    backend_options: BackendOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Erase keys from all checkpoint files of a stopped query, and print the receipt of a scan.

    Name all of the query's other backends. Needs --yes. Exits with 1 where something still has a key, as savepoints
    have: these are touched with --savepoints only. Whatever stops it, run it again. Words are as get takes them; before
    one that begins with a dash write --.
    """
    if savepoints and not savepoint:
        raise UsageError("--savepoints writes those savepoints anew that you name with --savepoint: name one")
    meant = _Operator.at(root, operator, storage_options)
    wanted = meant.keys(query_folder, keys, as_json)
    if not yes:
        too = f" and {len(savepoint or ())} savepoints" if savepoints else ""
        raise UsageError(
            f"this writes the checkpoint files of {meant.name!r} below {meant.root}{too} anew without "
            f"{wanted.num_rows} keys, and nobody can undo it: look with erase scan, and give --yes to do it"
        )
    done = erase_history(
        meant.root,
        wanted,
        operator=meant.name,
        query_folder=query_folder,
        storage_options=storage_options,
        backends=_backends(backend, backend_options),
        local_dirs=local_dir or (),
        inline_batches=inline_batches,
        savepoints=savepoint or (),
        write_savepoints=savepoints,
    )
    for where in done.savepoints_with_keys:
        say(f"the savepoint at {where} has a key: write it anew with --savepoint {where} --savepoints, or delete it")
    code = _write_receipt(done.receipt, output)
    say(
        f"written_anew={done.files} rows={done.rows} requests={done.requests} stores={done.stores} "
        f"savepoints={done.savepoints}"
    )
    raise typer.Exit(code)


def _backends(roots: Sequence[str] | None, options: dict[str, Any]) -> list[Backend]:
    return [Backend(root, storage_options=options) for root in roots or ()]


def _write_receipt(receipt: EraseReceipt, output: Output) -> int:
    """Print a receipt, what has a key first; gives the exit code."""
    write_table(receipt.to_table(), output)
    looked_at = sum(it.files for it in receipt.scanned)
    say(
        f"operator={receipt.operator} keys={receipt.keys} by_rows_only={receipt.keys_by_rows_only} "
        f"files={looked_at} found={len(receipt.found)} out_of_reach={len(receipt.out_of_reach)}"
    )
    return DONE if receipt.absent else NO
