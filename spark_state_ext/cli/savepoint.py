"""What is known of a savepoint, and what may be done with it: ``python -m spark_state_ext savepoint status PATH``.

``status`` says what is in it, who was started from it, and whether it may be deleted; ``release`` frees a claim whose
owner died, to a savepoint or to a query folder; ``delete`` removes what its manifest names
(`docs/operating/savepoints.md`). Savepoints are taken through Spark, with `spark_state_ext.take_savepoint`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.cli.roots import operators_below
from spark_state_ext.errors import NotClaimableError, StateError, UsageError
from spark_state_ext.files.folder import Folder, refuse_relative
from spark_state_ext.ownership.lease_log import LEASE_FOLDER
from spark_state_ext.ownership.release import release_query_folder
from spark_state_ext.savepoints.claims import CLAIM_FOLDER, release_claim
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.removing import delete_files
from spark_state_ext.savepoints.status import claimed, judged, started_below

__all__ = ["main"]


def _print(manifest: SavepointManifest) -> None:
    header = manifest.header
    made = datetime.fromtimestamp(header.made_ms / 1000, timezone.utc).isoformat(timespec="seconds")
    print(f"id={header.id} form={header.form} made={made} release={header.package_version}")
    print(f"query={header.query_id or '-'} batch={header.batch} watermark_ms={header.watermark_ms}")
    for name, operator in sorted(header.operators.items()):
        mine = [it for it in manifest.buckets if it.operator == name]
        files = [file for it in mine for file in it.files]
        print(
            f"operator={name} buckets={operator.buckets} rows_max={sum(it.pointer.rows for it in mine)} "
            f"files={len(files)} bytes={sum(file.size_bytes for file in files)}"
        )


def _status(savepoint: Folder, roots: Sequence[Folder]) -> int:
    manifest = read_manifest(savepoint)
    _print(manifest)
    started = [it for root in roots for it in started_below(root, savepoint.root, manifest.header.id)]
    for it in started:
        print(f"started={it.query_folder} mode={it.record.mode} detached={'yes' if it.detached else 'no'}")
    claim, consumed = claimed(savepoint)
    print(judged(started, claim, consumed, [root.root for root in roots], manifest.header.operators))
    return 0


def _release(folder: Folder, force: bool) -> int:
    names = set(folder.names())
    if LEASE_FOLDER in names and names.isdisjoint({MANIFEST_NAME, CLAIM_FOLDER}):
        by = release_query_folder(folder, force=force).by
    else:
        by = release_claim(folder).by
    print(f"released: the claim of {by}")
    return 0


def _delete(savepoint: Folder, roots: Sequence[Folder], force: bool) -> int:
    claim, consumed = claimed(savepoint)
    if MANIFEST_NAME in savepoint.names():
        manifest = read_manifest(savepoint)
        started = [it for root in roots for it in started_below(root, savepoint.root, manifest.header.id)]
        verdict = judged(started, claim, consumed, [root.root for root in roots], manifest.header.operators)
        if not verdict.deletable and not force:
            raise NotClaimableError(
                f"{savepoint.root} is not deleted: {verdict.because} (--force deletes it all the same)"
            )
        print(f"deleted={delete_files(savepoint, manifest)}")
        return 0
    raise UsageError(
        f"{savepoint.root} has no {MANIFEST_NAME}, so what belongs to it is not known: remove the folder by hand where "
        "a savepoint failed there"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spark_state_ext savepoint", description="What is known of a savepoint, and what may be done with it."
    )
    parser.add_argument("verb", choices=("status", "release", "delete"), help="what to do")
    parser.add_argument("path", help="the savepoint's folder, or for release a query folder: an absolute path or a URL")
    parser.add_argument(
        "--root",
        action="append",
        default=[],
        metavar="ROOT",
        help="root of an ArrowState whose queries may have been started from it; may be given several times",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="delete: also where a query may still need it; release: also where a first batch may be committed",
    )
    parser.add_argument(
        "--storage-options", type=json.loads, default={}, metavar="JSON", help="of fsspec's file systems"
    )
    return parser


def _root(path: str, storage_options: Mapping[str, Any]) -> Folder:
    """A root in which somebody has state: below a wrong one nobody would be found."""
    refuse_relative(path, "a root")
    root = Folder(path.rstrip("/") or path, storage_options)
    operators_below(root)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when it could be done, 1 when it was refused or failed, 2 for wrong arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        savepoint = Folder(options.path.rstrip("/") or options.path, options.storage_options)
        roots = [_root(root, options.storage_options) for root in options.root]
        if options.verb == "status":
            return _status(savepoint, roots)
        if options.verb == "release":
            return _release(savepoint, options.force)
        return _delete(savepoint, roots, options.force)
    except StateError as error:
        print(f"{parser.prog}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
