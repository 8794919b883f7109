"""The savepoint commands: status, create, verify, copy, claim, release and delete."""

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
    DELETES,
    SavepointClaim,
    claim_savepoint,
    delete_claimed_savepoint,
    drop_claim,
    is_consumed,
    read_claim,
    release_claim,
)
from spark_state_ext.savepoints.deletion import delete_files
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.status import StartedQuery, Verdict, find_started_queries, judge, read_claim_status
from spark_state_ext.savepoints.writer import SavepointWriter

__all__ = ["claim", "copy", "copy_savepoint", "create", "delete", "release", "status", "verify"]

_STATUS_COLUMNS = parse_columns(
    "id, form, made time_ms, release, query, batch int, watermark time_ms, deletable bool, because",
    operators=parse_columns("operator, buckets int, rows_max int, files int, bytes int"),
    started=parse_columns("query_folder, mode, detached bool"),
)
_CREATE_COLUMNS = parse_columns(
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
    """Print what is in a savepoint, which queries started from it, and whether it may be deleted."""
    folder = open_folder(path, storage_options)
    started, verdict, manifest = _inspect(folder, root or (), storage_options)
    header, operators = manifest.header, []
    for name, operator in sorted(header.operators.items()):
        saved_buckets = [saved_bucket for saved_bucket in manifest.buckets if saved_bucket.operator == name]
        files = [file for saved_bucket in saved_buckets for file in saved_bucket.files]
        operators.append(
            {
                "operator": name,
                "buckets": operator.buckets,
                "rows_max": sum(saved_bucket.pointer.rows for saved_bucket in saved_buckets),
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
            {
                "query_folder": saved_bucket.query_folder,
                "mode": saved_bucket.record.mode,
                "detached": saved_bucket.detached,
            }
            for saved_bucket in started
        ],
    }
    write_record(record, _STATUS_COLUMNS, output)


def _inspect(
    savepoint: Folder, roots: Sequence[str], storage_options: dict[str, Any]
) -> tuple[list[StartedQuery], Verdict, SavepointManifest]:
    """Return the queries below roots that started from a savepoint, whether it may be deleted, and its manifest."""
    folders = [_open_root(root, storage_options) for root in roots]
    manifest = read_manifest(savepoint)
    started = [query for root in folders for query in find_started_queries(root, savepoint.root, manifest.header.id)]
    claim, consumed = read_claim_status(savepoint)
    root_paths = [root.root for root in folders]
    return started, judge(started, claim, consumed, root_paths, manifest.header.operators), manifest


def _open_root(path: str, storage_options: dict[str, Any]) -> Folder:
    """Open a root, and refuse one without state: below a wrong root no query would be found."""
    root = open_folder(make_absolute(path), storage_options)
    list_operators(root)
    return root


# -- create ---------------------------------------------------------------------------------------


def create(
    path: Annotated[str, typer.Argument(help="folder of the new savepoint, a path or a URL; must not exist yet")],
    checkpoint: Annotated[str, typer.Option(metavar="LOCATION", help="the query's checkpointLocation")],
    root: Annotated[str, typer.Option(metavar="ROOT", help="root of the query's ArrowState")],
    form: Annotated[str, typer.Option(metavar="FORM", help="native (files as they are) or canonical")] = "native",
    batch: Annotated[int | None, typer.Option(metavar="N", help="which batch; by default the last committed")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="read every file to the last byte")] = False,
    *,
    storage_options: StorageOptions,
    root_options: Annotated[dict[str, Any], make_json_option("the root")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Take a savepoint of a query, even while it runs. Needs PySpark 4.0 or newer.

    Settings and packages that Spark needs come from PYSPARK_SUBMIT_ARGS or spark-defaults.conf.
    """
    # Imported here, so that other commands start without PySpark.
    from spark_state_ext.cli.sessions import get_session, refuse_occupied, unwrap_task_errors
    from spark_state_ext.spark.client.savepoints import take_savepoint
    from spark_state_ext.spark.client.state import ArrowState
    from spark_state_ext.spark.client.state_reader import StateReader

    # Tasks have other working folders. (Spark itself resolves a relative checkpoint location.)
    path, root = make_absolute(path), make_absolute(root)
    # Check the arguments before Spark starts.
    if form not in (NATIVE, CANONICAL):
        raise UsageError(f"--form must be {NATIVE} or {CANONICAL}, not {form!r}")
    list_operators(open_folder(root, root_options))
    refuse_occupied(path, storage_options, "the savepoint")
    spark = get_session(checkpoint)
    operators = sorted({store.operator for store in StateReader(spark, checkpoint).stores()})
    if not operators:
        raise MissingCheckpointError(
            f"{checkpoint} has no state of spark_state_ext: give the checkpointLocation of a query that has committed "
            "a batch with data"
        )
    states = [ArrowState(root, name, storage_options=root_options) for name in operators]
    with unwrap_task_errors():
        savepoint = take_savepoint(
            spark, path, checkpoint, states, form=form, batch=batch, verify=verify, storage_options=storage_options
        )
    record = {
        name: getattr(savepoint, name) for name in ("path", "id", "form", "batch", "files", "duplicated", "streamed")
    }
    record |= {"watermark": savepoint.watermark_ms, "operators": operators, "bytes": savepoint.size_bytes}
    write_record(record, _CREATE_COLUMNS, output)


# -- verify ---------------------------------------------------------------------------------------


def verify(
    path: SavepointPath,
    every: AllFilesOption = False,
    local_dir: ScratchOption = None,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Read every byte of a savepoint, and print which file is damaged, missing or replaced. Exits with 1 if one is."""
    folder = open_folder(path, storage_options)
    if not folder.exists(MANIFEST_NAME):
        # Raises the error about the missing manifest.
        read_manifest(folder)
    # Imported here, because it imports every file format, which the other commands do not need.
    from spark_state_ext.cli.verify import verify as verify_files

    verify_files(path, every, local_dir, storage_options=storage_options, output=output)


# -- copy -----------------------------------------------------------------------------------------


def copy(
    path: SavepointPath,
    to: Annotated[str, typer.Argument(metavar="TARGET", help="the copy's folder; must not exist yet")],
    *,
    storage_options: StorageOptions,
    to_options: Annotated[dict[str, Any], make_json_option("the copy")],
) -> None:
    """Copy the files that a savepoint's manifest names, and the manifest last. The copy has the same id.

    If both folders are in the same store with equal options, files are linked or copied by the store. Otherwise each is
    read and verified on its way.
    """
    source, target = open_folder(path, storage_options), open_folder(to, to_options)
    manifest = read_manifest(source)
    sizes = [file.size_bytes for bucket in manifest.buckets for file in bucket.files]
    with show_progress("copying", sum(sizes)) as advance:
        duplicated = copy_savepoint(source, manifest, target, advance)
    say(f"files={len(sizes)} bytes={sum(sizes)} duplicated={duplicated} to={target.root}")


def copy_savepoint(
    source: Folder, manifest: SavepointManifest, target: Folder, advance: Callable[[int], None] = lambda size: None
) -> int:
    """Copy a savepoint; return how many files were linked or copied by the store."""
    writer = SavepointWriter(source, manifest, target)
    duplicated = writer.copy(manifest.buckets, advance)
    writer.finish(manifest.header)
    return duplicated


# -- claim, release, delete -----------------------------------------------------------------------


def claim(
    path: SavepointPath,
    by: Annotated[str, typer.Option(metavar="NAME", help="your name, so that others know whom to ask")],
    *,
    storage_options: StorageOptions,
) -> None:
    """Claim a savepoint by hand: until savepoint release, no query can start from it or delete it.

    Refused if a query has already claimed it; the error names that query.
    """
    if not by.strip():
        raise UsageError("--by must name somebody, so that others know whom to ask")
    folder = open_folder(path, storage_options)
    claim_record = SavepointClaim(read_manifest(folder).header.id, f"{by} (claimed by hand)", uuid.uuid4().hex)
    claim_savepoint(folder, claim_record, ())
    say(f"claimed: {folder.root} by {claim_record.by}")


def release(
    path: Annotated[str, typer.Argument(help="the savepoint's folder, or a query folder: an absolute path or a URL")],
    force: Annotated[bool, typer.Option("--force", help="release even if a first batch may be committed")] = False,
    *,
    storage_options: StorageOptions,
) -> None:
    """Free the claim on a savepoint or a query folder if the claiming query is gone for good."""
    folder = open_folder(path, storage_options)
    names = set(folder.names())
    if LEASE_FOLDER in names and names.isdisjoint({MANIFEST_NAME, CLAIM_FOLDER}):
        released = release_query_folder(folder, force=force)
        note = "" if released.instead_of is None else f"; the claim {released.instead_of} is valid again"
        say(f"released: the claim of {released.by}{note}")
    else:
        say(f"released: the claim of {release_claim(folder).by}")


def delete(
    path: SavepointPath,
    root: RootsOption = None,
    force: Annotated[bool, typer.Option("--force", help="delete even if a query may still need it")] = False,
    *,
    storage_options: StorageOptions,
) -> None:
    """Delete the files that a savepoint's manifest names, if no query needs them."""
    savepoint, roots = open_folder(path, storage_options), root or ()
    claim_record = read_claim(savepoint)
    if MANIFEST_NAME not in savepoint.names():
        if claim_record is not None and claim_record.deletes:
            # A deletion was stopped after it had removed the manifest, its last file.
            say(f"deleted={delete_claimed_savepoint(savepoint, claim_record.id, lambda: None)}")
            return
        for root_path in roots:
            _open_root(root_path, storage_options)
        raise UsageError(
            f"{savepoint.root} has no {MANIFEST_NAME}, so it is unknown which files belong to it: if a savepoint "
            "failed there, remove the folder by hand"
        )
    if claim_record is None and savepoint.creates_exclusively:
        if not force:
            _refuse_needed(savepoint, roots, storage_options)
        # From now on no query starts from it.
        claim_record = SavepointClaim(read_manifest(savepoint).header.id, DELETES, uuid.uuid4().hex)
        claim_savepoint(savepoint, claim_record, ())
    deletes = claim_record is not None and claim_record.deletes
    try:
        if not force:
            # A query may have started from it before the claim was made.
            _refuse_needed(savepoint, roots, storage_options)
    except BaseException:
        if deletes and not is_consumed(savepoint):
            drop_claim(savepoint)
        raise
    if claim_record is not None and deletes:
        deleted = delete_claimed_savepoint(savepoint, claim_record.id, lambda: None)
    else:
        deleted = delete_files(savepoint, read_manifest(savepoint))
        if claim_record is not None and claim_record.erases:
            # This claim belongs to an erasure, which has nothing left to erase. A query removes its own claim itself.
            drop_claim(savepoint)
            savepoint.remove_if_empty()
    say(f"deleted={deleted}")


def _refuse_needed(savepoint: Folder, roots: Sequence[str], storage_options: dict[str, Any]) -> None:
    """Raise an error if a query may still need a savepoint."""
    _, verdict, _ = _inspect(savepoint, roots, storage_options)
    if not verdict.deletable:
        raise NotClaimableError(f"{savepoint.root} is not deleted: {verdict.because} (--force deletes it anyway)")
