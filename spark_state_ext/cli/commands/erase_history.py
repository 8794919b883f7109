"""``erase history``: erase keys from all checkpoint files of a stopped query."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_state_ext.cli.erasing import (
    BackendOptions,
    BackendsOption,
    JsonKeys,
    KeyWords,
    LocalDirsOption,
    RootPath,
    backends_of,
    keys_of,
    operator_at,
    write_receipt,
)
from spark_state_ext.cli.opening import OperatorOption, QueryFolderOption
from spark_state_ext.cli.output import Output, say
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.erasing.history import erase_history
from spark_state_ext.errors import UsageError

__all__ = ["command"]


def command(
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
    savepoint: Annotated[list[str] | None, typer.Option(metavar="FOLDER", help="a savepoint to look at")] = None,
    savepoints: Annotated[
        bool, typer.Option("--savepoints", help="write those savepoints anew, too: else they are not touched")
    ] = False,
    storage_options: StorageOptions = "{}",
    backend_options: BackendOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Erase keys from all checkpoint files of a stopped query, and print the receipt of a scan.

    Name all of the query's other backends. Needs --yes. Exits with 1 where something still has a key, as savepoints
    have: these are touched with --savepoints only. Whatever stops it, run it again. Words are as get takes them; before
    one that begins with a dash write --.
    """
    if savepoints and not savepoint:
        raise UsageError("--savepoints writes those savepoints anew that you name with --savepoint: name one")
    options = options_of(storage_options)
    root, operator = operator_at(root, operator, options)
    wanted = keys_of(root, operator, query_folder, keys, as_json, options)
    if not yes:
        too = f" and {len(savepoint or ())} savepoints" if savepoints else ""
        raise UsageError(
            f"this writes the checkpoint files of {operator!r} below {root}{too} anew without {wanted.num_rows} keys, "
            "and nobody can undo it: look with erase scan, and give --yes to do it"
        )
    done = erase_history(
        root,
        wanted,
        operator=operator,
        query_folder=query_folder,
        storage_options=options,
        backends=backends_of(backend, backend_options),
        local_dirs=local_dir or (),
        inline_batches=inline_batches,
        savepoints=savepoint or (),
        write_savepoints=savepoints,
    )
    for where in done.savepoints_with_keys:
        say(f"the savepoint at {where} has a key: write it anew with --savepoint {where} --savepoints, or delete it")
    code = write_receipt(done.receipt, output)
    say(
        f"written_anew={done.files} rows={done.rows} requests={done.requests} stores={done.stores} "
        f"savepoints={done.savepoints}"
    )
    raise typer.Exit(code)
