"""Scans every file that this package writes, as far as it is reachable from here, for keys.

Names of files alone decide nothing, and no file is skipped silently: what cannot be read is reported
(`docs/design/007b-erasing.md`).
"""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arrow_schemas.erase import ERASE_FOLDER, parse_erase_name
from arrow_schemas.lineage import DELTA, parse_file_name
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import RowSchema
from arrow_schemas.savepoint import MANIFEST_NAME
from spark_state_ext.backends.registry import FSSPEC, Backend
from spark_state_ext.erasing.leftovers import scratch_with_keys
from spark_state_ext.erasing.query_folders import QueryFolder, convert_keys, find_query_folders
from spark_state_ext.erasing.receipt import EraseReceipt, FoundIn, OutOfReach, Scanned
from spark_state_ext.erasing.search import Search, SearchedKeys
from spark_state_ext.errors import CorruptError, CorruptFileError, MissingCheckpointError, UsageError
from spark_state_ext.files.checkpoint import open_body
from spark_state_ext.files.erase_requests import decode_request
from spark_state_ext.files.folder import Entry, Folder, Readable, is_temporary, refuse_relative
from spark_state_ext.files.layout import SPILL_FOLDER, START_NAME, STARTING_FOLDER
from spark_state_ext.files.sealed_file import SealedFile, SealedFiles
from spark_state_ext.savepoints.captured_pointers import Captured
from spark_state_ext.savepoints.manifest_file import decode_manifest
from spark_state_ext.savepoints.start_records import read_start
from spark_state_ext.store.local_disk import DATA_FILE, LOCK_FILE

__all__ = ["erase_scan"]

KEYS_MAX = 1_000
_CAPTURED_SUFFIX = ".start.arrow"
# A note of a batch without data, during which a query waits to be rescaled.
_NOTED_SUFFIX = ".pointer"
_SPARK_STATE = "state/"
_STORES = "spark_state_ext-*"
_NAMED_MAX = 10


def erase_scan(
    root: str,
    keys: Any,
    *,
    operator: str = "state",
    storage_options: Mapping[str, Any] | None = None,
    backends: Sequence[Backend] = (),
    savepoints: Sequence[str] = (),
    local_dirs: Sequence[str] = (),
    checkpoint_location: str | None = None,
) -> EraseReceipt:
    """Search all files of an operator for keys, and report what was searched and what could not be.

    It reads every file and changes none. A running query creates and removes files meanwhile; stop it first for a
    receipt that stays valid.

    Parameters
    ----------
    root, operator, storage_options
        As given to `ArrowState`.
    keys
        As for `erase_keys`; at most a thousand.
    backends
        The query's other backends.
    savepoints
        Folders of savepoints.
    local_dirs
        Folders of this machine with local stores: `local_dir`, or Spark's local folders.
    checkpoint_location
        Spark's checkpoint of the query. The files of Spark's own state are only counted, because they are in Spark's
        formats.

    Returns
    -------
    EraseReceipt
        What was searched, which files have keys, and what is out of reach.

    Raises
    ------
    StateValueError
        If the keys do not fit the operator's key columns.
    UsageError
        If there is no such operator or folder, or there are too many keys.
    StorageError
        If the storage fails.

    Examples
    --------
    >>> receipt = erase_scan("/state", ["Jane Doe"], operator="count")  # doctest: +SKIP
    >>> receipt.absent, receipt.to_table()  # doctest: +SKIP
    """
    folders = find_query_folders(root, operator, None, storage_options, in_force=False)
    # All schemas have the same keys; state columns are read with the newest schema.
    searched_keys = SearchedKeys.of(convert_keys(keys, folders[0].schema, "erase_scan()"))
    if searched_keys.keys.num_rows > KEYS_MAX:
        raise UsageError(f"erase_scan() was given more than {KEYS_MAX:,} keys: scan for them in several calls")
    began_ms = int(time.time() * 1000)
    with scratch_with_keys() as scratch:
        scan = _Scan(searched_keys, scratch)
        scan.note_begun(folders)
        roots = [Folder(root.rstrip("/") or root, storage_options)]
        for backend in backends:
            if backend.kind == FSSPEC:
                roots.append(Folder(backend.root, backend.storage_options))
            else:
                scan.add_out_of_reach(
                    "backend",
                    backend.name,
                    0,
                    0,
                    f"its kind {backend.kind} belongs to another package",
                    unread=True,
                )
        schemas = {folder.name: folder.schema for folder in folders}
        for root_folder in roots:
            scan.scan_operator(root_folder.child(operator), schemas, folders[0].schema)
        if not savepoints:
            scan.add_out_of_reach(
                "savepoint",
                "",
                0,
                0,
                "none was named, but savepoints that you took may still have the keys: name them with savepoints",
            )
        for path in savepoints:
            refuse_relative(path, "a savepoint")
            scan.scan_savepoint(Folder(path.rstrip("/") or path, storage_options), operator)
        for path in local_dirs:
            scan.scan_local_stores(Path(path), operator)
        scan.add_out_of_reach(
            "local store",
            "other machines" if local_dirs else "every machine of the executors",
            0,
            0,
            "a cache in local_dir there: name the ones on this machine with local_dirs, and delete the others while "
            "the "
            "query is stopped",
        )
        if checkpoint_location is None:
            why = "not named: Spark's state may have deltas inline; name checkpoint_location to count its files"
            scan.add_out_of_reach("Spark's checkpoint", "", 0, 0, why)
        else:
            scan.scan_spark_checkpoint(Folder(checkpoint_location.rstrip("/"), storage_options))
        return scan.make_receipt(operator, began_ms)


class _Scan:
    """A running scan."""

    def __init__(self, searched_keys: SearchedKeys, scratch: Path) -> None:
        self._searched_keys = searched_keys
        self._scratch = scratch
        self._scanned: dict[tuple[str, str], Scanned] = {}
        self._found: list[FoundIn] = []
        self._out_of_reach: list[OutOfReach] = []
        # Ids of savepoints that queries below the root began with, and the operator's name there.
        self._begun: set[tuple[str, str]] = set()

    def note_begun(self, folders: Sequence[QueryFolder]) -> None:
        """Note the savepoints that queries began with, because the operator may have another name there."""
        for folder in folders:
            try:
                record = read_start(folder.files)
            except CorruptError as error:
                why = f"the savepoint that the query began with, and its operator's name there, are unknown: {error}"
                self.add_out_of_reach("start", folder.files.where(START_NAME), 1, 0, why, unread=True)
                continue
            if record is not None and record.source_id:
                self._begun.add((record.source_id, record.operator))

    def make_receipt(self, operator: str, began_ms: int) -> EraseReceipt:
        return EraseReceipt(
            operator,
            self._searched_keys.keys.num_rows,
            self._searched_keys.by_rows_only,
            began_ms,
            tuple(self._scanned[key] for key in sorted(self._scanned)),
            tuple(sorted(self._found, key=lambda file: (file.kind, file.where))),
            tuple(self._out_of_reach),
        )

    def add_out_of_reach(
        self, kind: str, where: str, files: int, size_bytes: int, why: str, unread: bool = False
    ) -> None:
        self._out_of_reach.append(OutOfReach(kind, where, files, size_bytes, why, unread))

    def _add_scanned(self, kind: str, below: str, where: str, size_bytes: int, search: Search) -> None:
        scanned = self._scanned.get((kind, below), Scanned(kind, below, 0, 0, 0))
        self._scanned[kind, below] = replace(
            scanned,
            files=scanned.files + 1,
            size_bytes=scanned.size_bytes + size_bytes,
            rows=scanned.rows + search.compared,
        )
        if search.found:
            self._found.append(FoundIn(kind, where, search.rows, search.tombstones, search.keys_by_bytes))

    # -- places ------------------------------------------------------------------------------------

    def scan_operator(self, folder: Folder, schemas: Mapping[str, RowSchema], schema: RowSchema) -> None:
        """Scan all files below ``<root>/<operator>``."""
        spills: list[Entry] = []
        for entry in folder.tree():
            parts = entry.name.split("/")
            own_schema = schemas.get(parts[0], schema)
            if SPILL_FOLDER in parts[:2]:
                spills.append(entry)
            elif is_temporary(parts[-1]):
                self._scan_unfinished(folder, entry, "erase_history removes it, or clean-up after a day")
            elif parse_file_name(parts[-1]) is not None:
                self._scan_checkpoint("checkpoint file", folder, entry, own_schema)
            elif len(parts) == 3 and parts[1] == ERASE_FOLDER and parse_erase_name(parts[2]) is not None:
                self._scan_request(folder, entry)
            elif parts[0] == STARTING_FOLDER and parts[-1].endswith(_CAPTURED_SUFFIX):
                self._scan_pointers("start", folder, entry, schema, _decode_captured)
            elif parts[0] == STARTING_FOLDER and parts[-1].endswith(_NOTED_SUFFIX):
                self._scan_pointers("start", folder, entry, schema, _decode_noted)
            else:
                self._scan_bytes("other file", folder, entry)
        if spills:
            size = sum(entry.size_bytes for entry in spills)
            why = "compressed rows in transit: the next batch of the query removes them"
            self.add_out_of_reach("spill file", folder.root, len(spills), size, why, unread=True)

    def scan_savepoint(self, folder: Folder, operator: str) -> None:
        """Scan all files of a savepoint."""
        entries = folder.tree()
        if not entries:
            raise UsageError(f"there is no savepoint at {folder.root}: check the path")
        has_manifest = MANIFEST_NAME in {entry.name for entry in entries}
        manifest = decode_manifest(folder.get(MANIFEST_NAME), folder.where(MANIFEST_NAME)) if has_manifest else None
        schemas = (
            {} if manifest is None else {name: file.row_schema() for name, file in manifest.header.operators.items()}
        )
        operator_names = {
            operator,
            *(
                name
                for savepoint_id, name in self._begun
                if manifest is not None and savepoint_id == manifest.header.id
            ),
        }
        if manifest is not None and operator_names.isdisjoint(schemas):
            # The operator is unknown, so rows cannot be compared, and bytes cannot show keys without strings.
            others = ", ".join(sorted(schemas)[:_NAMED_MAX])
            why = (
                f"searched as bytes only: it has no operator {operator!r} but {others}, and no query below the root "
                "began with it. Scan for the keys of the operator that it has"
            )
            self.add_out_of_reach(
                "savepoint", folder.root, len(entries), sum(entry.size_bytes for entry in entries), why, unread=True
            )
        for entry in entries:
            parts = entry.name.split("/")
            schema = schemas.get(parts[0])
            if is_temporary(parts[-1]):
                self._scan_unfinished(folder, entry, "remove it if the savepoint is not being written")
            elif entry.name == MANIFEST_NAME and schemas:
                self._scan_pointers("savepoint manifest", folder, entry, None, _decode_saved)
            elif parse_file_name(parts[-1]) is not None and schema is not None and parts[0] in operator_names:
                self._scan_checkpoint("savepoint file", folder, entry, schema)
            elif parse_file_name(parts[-1]) is not None and schema is None:
                self._scan_bytes("savepoint file", folder, entry)
                self.add_out_of_reach(
                    "savepoint file",
                    folder.where(entry.name),
                    1,
                    entry.size_bytes,
                    "it is in no manifest",
                    unread=True,
                )
            else:
                # Other operators have other keys, but their rows may contain values of these keys.
                self._scan_bytes("other file", folder, entry)

    def scan_local_stores(self, local_dir: Path, operator: str) -> None:
        """Scan all local stores of an operator on this machine, including free pages."""
        if not local_dir.is_dir():
            raise UsageError(f"there is no folder {local_dir}: give the local_dir of the ArrowState")
        locks: list[int] = []
        for stores in sorted(local_dir.glob(_STORES)):
            own_name = re.compile("[0-9a-f]{16}-" + re.escape(operator))
            folders = [*(folder for folder in stores.iterdir() if own_name.fullmatch(folder.name)), stores / "scratch"]
            for path in sorted(file for folder in folders for file in folder.rglob("*") if file.is_file()):
                if path.name == LOCK_FILE and path.with_name(DATA_FILE).exists():
                    # Closing the file would release this process's LMDB locks on it (POSIX), also for a state that
                    # is open here.
                    locks.append(path.stat().st_size)
                    continue
                try:
                    size, search = path.stat().st_size, Search(self._searched_keys)
                    with path.open("rb") as file:

                        def read(start: int, end: int, file: Any = file) -> bytes:
                            file.seek(start)
                            data: bytes = file.read(end - start)
                            return data

                        search.search_file(read, size)
                except FileNotFoundError:  # a running query has removed it
                    continue
                except OSError as error:
                    self.add_out_of_reach("local store", str(path), 1, 0, f"it cannot be read: {error}", unread=True)
                    continue
                self._add_scanned("local store", str(stores), str(path), size, search)
        if locks:
            why = f"LMDB's {LOCK_FILE} is not opened: it has process and transaction numbers, but no rows"
            self.add_out_of_reach("local store", str(local_dir), len(locks), sum(locks), why)
        if self._searched_keys.by_rows_only:
            why = (
                f"{self._searched_keys.by_rows_only} keys have no string of at least four bytes to search its pages for"
            )
            self.add_out_of_reach("local store", str(local_dir), 0, 0, why)

    def scan_spark_checkpoint(self, folder: Folder) -> None:
        """Scan Spark's checkpoint, except its state files, which are only counted."""
        state: list[Entry] = []
        entries = folder.tree()
        if not entries:
            raise UsageError(f"{folder.root} does not exist or is empty: name the query's checkpointLocation")
        for entry in entries:
            if entry.name.startswith(_SPARK_STATE):
                state.append(entry)
            else:
                self._scan_bytes("Spark's checkpoint", folder, entry)
        size = sum(entry.size_bytes for entry in state)
        why = (
            "Spark's own state: it may have inline deltas of up to inline_bytes_max that no backend had confirmed; "
            "Spark removes them with the batches that it no longer retains"
        )
        self.add_out_of_reach("Spark's checkpoint", folder.where(_SPARK_STATE), len(state), size, why)

    # -- files -------------------------------------------------------------------------------------

    def _scan_unfinished(self, folder: Folder, entry: Entry, what_then: str) -> None:
        """Scan a file that is being written, or whose writer died."""
        self._scan_bytes("unfinished file", folder, entry)
        why = f"searched as bytes only: its rows may be compressed; {what_then}"
        self.add_out_of_reach("unfinished file", folder.where(entry.name), 1, entry.size_bytes, why, unread=True)

    def _scan_checkpoint(self, kind: str, folder: Folder, entry: Entry, schema: RowSchema) -> None:
        name = posixpath.basename(entry.name)
        files = folder.child(*entry.name.split("/")[:-1])
        search = Search(self._searched_keys)
        try:
            self._search_rows_of(files, name, schema, search)
            search.search_file(lambda start, end: files.get_range(name, start, end), entry.size_bytes)
        except MissingCheckpointError:  # a running query has removed it
            return
        except CorruptError as error:
            search.search_file(lambda start, end: files.get_range(name, start, end), entry.size_bytes)
            self.add_out_of_reach(
                kind, files.where(name), 1, entry.size_bytes, f"searched as bytes only: {error}", unread=True
            )
        self._add_scanned(kind, folder.root, files.where(name), entry.size_bytes, search)

    def _search_rows_of(self, files: Readable, name: str, schema: RowSchema, search: Search) -> None:
        rows = 0
        with open_body(files, name, self._scratch) as body:
            for batch in body.reader:
                batch.validate()
                rows += batch.num_rows
                search.search_rows(batch.replace_schema_metadata(None), schema)
        if rows != body.record.rows:
            raise CorruptFileError(f"{files.where(name)} has {rows} rows, but its footer says {body.record.rows}")

    def _scan_request(self, folder: Folder, entry: Entry) -> None:
        """Scan an erase request, which has its keys, or the record of a finished request."""
        search, where = Search(self._searched_keys), folder.where(entry.name)
        try:
            data = folder.get(entry.name)
            search.search_bytes(data)
            if not entry.name.endswith(".json"):
                search.search_batch(decode_request(data, where).keys)
        except MissingCheckpointError:
            return
        except CorruptError as error:
            self.add_out_of_reach(
                "erase request", where, 1, entry.size_bytes, f"searched as bytes only: {error}", unread=True
            )
        self._add_scanned("erase request", folder.root, where, entry.size_bytes, search)

    def _scan_pointers(
        self,
        kind: str,
        folder: Folder,
        entry: Entry,
        schema: RowSchema | None,
        decode: Callable[[bytes, str], Iterator[tuple[Pointer, RowSchema | None]]],
    ) -> None:
        """Scan a file of pointers, which may have inline deltas."""
        search, where = Search(self._searched_keys), folder.where(entry.name)
        try:
            data = folder.get(entry.name)
            search.search_bytes(data)
            for pointer, pointer_schema in decode(data, where):
                search.search_bytes(pointer.encode())
                self._scan_inline(pointer, pointer_schema or schema, where, search)
        except MissingCheckpointError:
            return
        except CorruptError as error:
            self.add_out_of_reach(kind, where, 1, entry.size_bytes, f"searched as bytes only: {error}", unread=True)
        self._add_scanned(kind, folder.root, where, entry.size_bytes, search)

    def _scan_inline(self, pointer: Pointer, schema: RowSchema | None, where: str, search: Search) -> None:
        for delta in pointer.inline:
            assert schema is not None, "a file with pointers has a known operator"
            files = SealedFiles([SealedFile.of(delta.name, delta.data)], f"in {where}")
            assert delta.name.endswith(f"{DELTA}.arrow"), "only deltas are inline"
            self._search_rows_of(files, delta.name, schema, search)

    def _scan_bytes(self, kind: str, folder: Folder, entry: Entry) -> None:
        search = Search(self._searched_keys)
        try:
            search.search_file(lambda start, end: folder.get_range(entry.name, start, end), entry.size_bytes)
        except MissingCheckpointError:
            return
        self._add_scanned(kind, folder.root, folder.where(entry.name), entry.size_bytes, search)


def _decode_captured(data: bytes, where: str) -> Iterator[tuple[Pointer, RowSchema | None]]:
    yield from ((pointer, None) for pointer in Captured.decode(data, where).pointers.values())


def _decode_noted(data: bytes, where: str) -> Iterator[tuple[Pointer, RowSchema | None]]:
    yield Pointer.decode(data), None


def _decode_saved(data: bytes, where: str) -> Iterator[tuple[Pointer, RowSchema | None]]:
    manifest = decode_manifest(data, where)
    for saved in manifest.buckets:
        yield saved.pointer, manifest.header.operators[saved.operator].row_schema()
