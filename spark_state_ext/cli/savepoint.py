"""Savepoint: status, create, verify, copy, claim, release and delete."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from arrow_schemas.savepoint import CANONICAL, MANIFEST_NAME, NATIVE, SavepointManifest
from spark_state_ext.cli.options import (
    AllFilesOption,
    OutputOption,
    RootsOption,
    SavepointPath,
    ScratchOption,
    StorageOptions,
    make_json_option,
)
from spark_state_ext.cli.output import Output, parse_columns, say, show_progress, write_record
from spark_state_ext.cli.paths import list_operators, make_absolute, open_folder
from spark_state_ext.errors import MissingCheckpointError, NotClaimableError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import CLAIM_FOLDER, LEASE_FOLDER
from spark_state_ext.ownership.release import release_query_folder
from spark_state_ext.savepoints.claims import (
    SavepointClaim,
    claim_of,
    claim_savepoint,
    drop_claim,
    release_claim,
)
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.removing import delete_files
from spark_state_ext.savepoints.status import Started, Verdict, claimed, judged, started_below
from spark_state_ext.savepoints.writer import SavepointWriter

__all__ = ["claim", "copy", "copy_savepoint", "create", "delete", "release", "status", "verify"]

_STATUS = parse_columns(
    "id, form, made time_ms, release, query, batch int, watermark time_ms, deletable bool, because",
    operators=parse_columns("operator, buckets int, rows_max int, files int, bytes int"),
    started=parse_columns("query_folder, mode, detached bool"),
)
_TAKEN = parse_columns(
    "path, id, form, batch int, watermark time_ms, operators texts, files int, bytes int, duplicated int, streamed int"
)

# -- status ---------------------------------------------------------------------------------------


def status(
    path: SavepointPath,
    root: RootsOption = None,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what is in a savepoint, who was started from it, and whether it may be deleted."""
    folder = open_folder(path, storage_options)
    started, verdict, manifest = _looked_at(folder, root or (), storage_options)
    header, operators = manifest.header, []
    for name, operator in sorted(header.operators.items()):
        mine = [it for it in manifest.buckets if it.operator == name]
        files = [file for it in mine for file in it.files]
        operators.append(
            {
                "operator": name,
                "buckets": operator.buckets,
                "rows_max": sum(it.pointer.rows for it in mine),
                "files": len(files),
                "bytes": sum(file.size_bytes for file in files),
            }
        )
    record = {
        "id": header.id,
        "form": header.form,
        "made": header.made_ms,
        "release": header.package_version,
        "query": header.query_id or None,
        "batch": header.batch,
        "watermark": header.watermark_ms,
        **vars(verdict),
        "operators": operators,
        "started": [
            {"query_folder": it.query_folder, "mode": it.record.mode, "detached": it.detached} for it in started
        ],
    }
    write_record(record, _STATUS, output)


def _looked_at(
    savepoint: Folder, roots: Sequence[str], storage_options: dict[str, Any]
) -> tuple[list[Started], Verdict, SavepointManifest]:
    """Queries below roots that were started from a savepoint, whether it may be deleted, and what is in it."""
    folders = [_root(root, storage_options) for root in roots]
    manifest = read_manifest(savepoint)
    started = [it for root in folders for it in started_below(root, savepoint.root, manifest.header.id)]
    claim, consumed = claimed(savepoint)
    looked_in = [root.root for root in folders]
    return started, judged(started, claim, consumed, looked_in, manifest.header.operators), manifest


def _root(path: str, storage_options: dict[str, Any]) -> Folder:
    """A root in which somebody has state: below a wrong one nobody would be found."""
    root = open_folder(make_absolute(path), storage_options)
    list_operators(root)
    return root


# -- create ---------------------------------------------------------------------------------------


def create(
    path: Annotated[str, typer.Argument(help="the savepoint's folder, which does not exist yet: a path or a URL")],
    checkpoint: Annotated[str, typer.Option(metavar="LOCATION", help="the query's checkpointLocation")],
    root: Annotated[str, typer.Option(metavar="ROOT", help="root of the query's ArrowState")],
    form: Annotated[str, typer.Option(metavar="FORM", help="native (files as they are) or canonical")] = "native",
    batch: Annotated[int | None, typer.Option(metavar="N", help="the batch; by default the last committed")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="read every file to the last byte")] = False,
    *,
    storage_options: StorageOptions,
    root_options: Annotated[dict[str, Any], make_json_option("the root")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Take a savepoint of a query, which may run meanwhile. Needs PySpark 4.0 or newer.

    Settings and packages that Spark needs come from PYSPARK_SUBMIT_ARGS or spark-defaults.conf.
    """
    # PySpark is imported by nothing else here.
    from spark_state_ext.cli.sessions import get_session, refuse_occupied, unwrap_task_errors
    from spark_state_ext.spark.client.savepoints import take_savepoint
    from spark_state_ext.spark.client.state import ArrowState
    from spark_state_ext.spark.client.state_reader import StateReader

    # Tasks have other working folders. (What a relative location means to Spark is left to Spark.)
    path, root = make_absolute(path), make_absolute(root)
    # Before Spark starts.
    if form not in (NATIVE, CANONICAL):
        raise UsageError(f"--form must be {NATIVE} or {CANONICAL}, not {form!r}")
    list_operators(open_folder(root, root_options))
    refuse_occupied(path, storage_options, "the savepoint")
    spark = get_session(checkpoint)
    operators = sorted({it.operator for it in StateReader(spark, checkpoint).stores()})
    if not operators:
        raise MissingCheckpointError(
            f"{checkpoint} has no state of spark_state_ext: give Spark's checkpointLocation of a query that has "
            "committed a batch with data"
        )
    states = [ArrowState(root, name, storage_options=root_options) for name in operators]
    with unwrap_task_errors():
        taken = take_savepoint(
            spark, path, checkpoint, states, form=form, batch=batch, verify=verify, storage_options=storage_options
        )
    record = {name: getattr(taken, name) for name in ("path", "id", "form", "batch", "files", "duplicated", "streamed")}
    record |= {"watermark": taken.watermark_ms, "operators": operators, "bytes": taken.size_bytes}
    write_record(record, _TAKEN, output)


# -- verify ---------------------------------------------------------------------------------------


def verify(
    path: SavepointPath,
    every: AllFilesOption = False,
    local_dir: ScratchOption = None,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Read every byte of a savepoint, and say which file is damaged, missing or another one. Exits with 1 then."""
    folder = open_folder(path, storage_options)
    if not folder.exists(MANIFEST_NAME):
        # Says so.
        read_manifest(folder)
    # It knows every kind of file, which the other commands here need not.
    from spark_state_ext.cli.verify import verify as verify_files

    verify_files(path, every, local_dir, storage_options=storage_options, output=output)


# -- copy -----------------------------------------------------------------------------------------


def copy(
    path: SavepointPath,
    to: Annotated[str, typer.Argument(metavar="TARGET", help="the copy's folder, which does not exist yet")],
    *,
    storage_options: StorageOptions,
    to_options: Annotated[dict[str, Any], make_json_option("the copy")],
) -> None:
    """Copy what the manifest of a savepoint names, and the manifest last. The copy has the same id.

    Files are linked, or copied by the store, where both are in one and have equal options. Else each is read to the
    last byte on its way.
    """
    source, target = open_folder(path, storage_options), open_folder(to, to_options)
    manifest = read_manifest(source)
    sizes = [file.size_bytes for it in manifest.buckets for file in it.files]
    with show_progress("copying", sum(sizes)) as advance:
        duplicated = copy_savepoint(source, manifest, target, advance)
    say(f"files={len(sizes)} bytes={sum(sizes)} duplicated={duplicated} to={target.root}")


def copy_savepoint(
    source: Folder, manifest: SavepointManifest, target: Folder, advance: Callable[[int], None] = lambda size: None
) -> int:
    """Copy a savepoint; returns how many files were linked, or copied by the store."""
    writer = SavepointWriter(source, manifest, target)
    duplicated = writer.copy(manifest.buckets, advance)
    writer.finish(manifest.header)
    return duplicated


# -- claim, release, delete -----------------------------------------------------------------------


def claim(
    path: SavepointPath,
    by: Annotated[str, typer.Option(metavar="NAME", help="who claims it, for people")],
    *,
    storage_options: StorageOptions,
) -> None:
    """Claim a savepoint by hand: no query can start from it, and none deletes it, until savepoint release.

    Refused where a query has claimed it already, with that query's name.
    """
    if not by.strip():
        raise UsageError("--by must name somebody, so that others know whom to ask")
    folder = open_folder(path, storage_options)
    made = SavepointClaim(read_manifest(folder).header.id, f"{by} (claimed by hand)", uuid.uuid4().hex)
    claim_savepoint(folder, made, ())
    say(f"claimed: {folder.root} by {made.by}")


def release(
    path: Annotated[str, typer.Argument(help="the savepoint's folder, or a query folder: an absolute path or a URL")],
    force: Annotated[bool, typer.Option("--force", help="also where a first batch may be committed")] = False,
    *,
    storage_options: StorageOptions,
) -> None:
    """Free the claim to a savepoint or to a query folder, whose query is gone for good."""
    folder = open_folder(path, storage_options)
    names = set(folder.names())
    if LEASE_FOLDER in names and names.isdisjoint({MANIFEST_NAME, CLAIM_FOLDER}):
        freed = release_query_folder(folder, force=force)
        again = "" if freed.instead_of is None else f"; the claim {freed.instead_of} counts again"
        say(f"released: the claim of {freed.by}{again}")
    else:
        say(f"released: the claim of {release_claim(folder).by}")


def delete(
    path: SavepointPath,
    root: RootsOption = None,
    force: Annotated[bool, typer.Option("--force", help="also where a query may still need it")] = False,
    *,
    storage_options: StorageOptions,
) -> None:
    """Delete what the manifest of a savepoint names, where no query needs it any more."""
    savepoint, roots = open_folder(path, storage_options), root or ()
    if MANIFEST_NAME not in savepoint.names():
        for each in roots:
            _root(each, storage_options)
        raise UsageError(
            f"{savepoint.root} has no {MANIFEST_NAME}, so what belongs to it is not known: remove the folder by hand "
            "where a savepoint failed there"
        )
    _, verdict, manifest = _looked_at(savepoint, roots, storage_options)
    if not verdict.deletable and not force:
        raise NotClaimableError(f"{savepoint.root} is not deleted: {verdict.because} (--force deletes it all the same)")
    deleted = delete_files(savepoint, manifest)
    held = claim_of(savepoint)
    if held is not None and held.erases:
        # Of a query's claim the query itself makes an end. There is nothing left that keys could be erased from.
        drop_claim(savepoint)
        savepoint.remove_if_empty()
    say(f"deleted={deleted}")
