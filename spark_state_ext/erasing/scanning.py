"""Looking for what holds keys: every file that this package writes, as far as it can be reached from here.

Nothing is decided by names alone, and nothing is passed over in silence: what cannot be read is told
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
from spark_state_ext.erasing.folders import QueryFolder, keys_as_stored, query_folders_below
from spark_state_ext.erasing.leftovers import scratch_with_keys
from spark_state_ext.erasing.receipt import EraseReceipt, FoundIn, OutOfReach, Scanned
from spark_state_ext.erasing.searching import Search, Wanted
from spark_state_ext.errors import CorruptError, CorruptFileError, MissingCheckpointError, UsageError
from spark_state_ext.files.checkpoint import open_body
from spark_state_ext.files.erase_requests import decode_request
from spark_state_ext.files.folder import Entry, Folder, Readable, is_temporary, refuse_relative
from spark_state_ext.files.layout import SPILL_FOLDER, START_NAME, STARTING_FOLDER
from spark_state_ext.files.sealed import SealedFile, SealedFiles
from spark_state_ext.savepoints.captured import Captured
from spark_state_ext.savepoints.manifest_file import decode_manifest
from spark_state_ext.savepoints.records import start_of
from spark_state_ext.store.local_disk import DATA_FILE, LOCK_FILE

__all__ = ["erase_scan"]

KEYS_MAX = 1_000
_CAPTURED = ".start.arrow"
# Of a batch without data in which a query waits to be rescaled.
_NOTED = ".pointer"
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
    """Look for what holds keys of an operator, and tell what was looked at and what could not be.

    It reads every file, and changes nothing. While the query runs, files come and go meanwhile; for a receipt that
    stands, stop it first.

    Parameters
    ----------
    root, operator, storage_options
        As `ArrowState` has them.
    keys
        As for `erase_keys`; at most a thousand.
    backends
        The query's other backends.
    savepoints
        Folders of savepoints.
    local_dirs
        Folders of this machine in which there are local stores: `local_dir`, or Spark's local folders.
    checkpoint_location
        Spark's checkpoint of the query. What lies in its state is counted only: it is Spark's, and in formats of
        Spark's.

    Returns
    -------
    EraseReceipt
        What was looked at, what has keys, and what is out of reach.

    Raises
    ------
    StateValueError
        When the keys are not the operator's.
    UsageError
        When there is no such operator or folder, or too many keys.
    StorageError
        When a store fails.

    Examples
    --------
    >>> receipt = erase_scan("/state", ["Jane Doe"], operator="count")  # doctest: +SKIP
    >>> receipt.absent, receipt.to_table()  # doctest: +SKIP
    """
    folders = query_folders_below(root, operator, None, storage_options, in_force=False)
    # A change of schema keeps the keys; state columns are read as the newest has them.
    wanted = Wanted.of(keys_as_stored(keys, folders[0].schema, "erase_scan()"))
    if wanted.keys.num_rows > KEYS_MAX:
        raise UsageError(f"erase_scan() was given more than {KEYS_MAX:,} keys: scan for them in several calls")
    began_ms = int(time.time() * 1000)
    with scratch_with_keys() as scratch:
        scan = _Scan(wanted, scratch)
        scan.note_begun(folders)
        tops = [Folder(root.rstrip("/") or root, storage_options)]
        for backend in backends:
            if backend.kind == FSSPEC:
                tops.append(Folder(backend.root, backend.storage_options))
            else:
                scan.beyond(
                    "backend",
                    backend.name,
                    0,
                    0,
                    f"of the kind {backend.kind}, which is another package's",
                    unread=True,
                )
        schemas = {folder.name: folder.schema for folder in folders}
        for top in tops:
            scan.operator(top.child(operator), schemas, folders[0].schema)
        if not savepoints:
            scan.beyond("savepoint", "", 0, 0, "none was named: those that you took keep the keys; give savepoints")
        for path in savepoints:
            refuse_relative(path, "a savepoint")
            scan.savepoint(Folder(path.rstrip("/") or path, storage_options), operator)
        for path in local_dirs:
            scan.local_stores(Path(path), operator)
        scan.beyond(
            "local store",
            "other machines" if local_dirs else "every machine of the executors",
            0,
            0,
            "a cache in local_dir there: name those of this machine with local_dirs, delete the others while the query "
            "is stopped",
        )
        if checkpoint_location is None:
            why = "not named: Spark's state may hold deltas inline; give checkpoint_location to have its files counted"
            scan.beyond("Spark's checkpoint", "", 0, 0, why)
        else:
            scan.spark_checkpoint(Folder(checkpoint_location.rstrip("/"), storage_options))
        return scan.receipt(operator, began_ms)


class _Scan:
    """A scan that is under way."""

    def __init__(self, wanted: Wanted, scratch: Path) -> None:
        self._wanted = wanted
        self._scratch = scratch
        self._scanned: dict[tuple[str, str], Scanned] = {}
        self._found: list[FoundIn] = []
        self._beyond: list[OutOfReach] = []
        # What queries below the root began with, where an operator may have had another name.
        self._begun: set[tuple[str, str]] = set()

    def note_begun(self, folders: Sequence[QueryFolder]) -> None:
        """See what queries began with: in a savepoint the operator goes by the name that it had there."""
        for folder in folders:
            try:
                record = start_of(folder.files)
            except CorruptError as error:
                why = f"with which savepoint the query began, and its operator's name there, is not known: {error}"
                self.beyond("start", folder.files.where(START_NAME), 1, 0, why, unread=True)
                continue
            if record is not None and record.source_id:
                self._begun.add((record.source_id, record.operator))

    def receipt(self, operator: str, began_ms: int) -> EraseReceipt:
        return EraseReceipt(
            operator,
            self._wanted.keys.num_rows,
            self._wanted.by_rows_only,
            began_ms,
            tuple(self._scanned[key] for key in sorted(self._scanned)),
            tuple(sorted(self._found, key=lambda it: (it.kind, it.where))),
            tuple(self._beyond),
        )

    def beyond(self, kind: str, where: str, files: int, size_bytes: int, why: str, unread: bool = False) -> None:
        self._beyond.append(OutOfReach(kind, where, files, size_bytes, why, unread))

    def _note(self, kind: str, below: str, where: str, size_bytes: int, search: Search) -> None:
        before = self._scanned.get((kind, below), Scanned(kind, below, 0, 0, 0))
        self._scanned[kind, below] = replace(
            before,
            files=before.files + 1,
            size_bytes=before.size_bytes + size_bytes,
            rows=before.rows + search.compared,
        )
        if search.found:
            self._found.append(FoundIn(kind, where, search.rows, search.tombstones, search.keys_by_bytes))

    # -- places ------------------------------------------------------------------------------------

    def operator(self, folder: Folder, schemas: Mapping[str, RowSchema], schema: RowSchema) -> None:
        """All below ``<root>/<operator>``."""
        spills: list[Entry] = []
        for entry in folder.tree():
            parts = entry.name.split("/")
            own = schemas.get(parts[0], schema)
            if SPILL_FOLDER in parts[:2]:
                spills.append(entry)
            elif is_temporary(parts[-1]):
                self._unfinished(folder, entry, "erase_history removes it, or clean-up after a day")
            elif parse_file_name(parts[-1]) is not None:
                self._checkpoint("checkpoint file", folder, entry, own)
            elif len(parts) == 3 and parts[1] == ERASE_FOLDER and parse_erase_name(parts[2]) is not None:
                self._request(folder, entry)
            elif parts[0] == STARTING_FOLDER and parts[-1].endswith(_CAPTURED):
                self._pointers("start", folder, entry, schema, _captured)
            elif parts[0] == STARTING_FOLDER and parts[-1].endswith(_NOTED):
                self._pointers("start", folder, entry, schema, _noted)
            else:
                self._bytes("other file", folder, entry)
        if spills:
            size = sum(entry.size_bytes for entry in spills)
            why = "rows in transit, compressed: the next batch of the query removes them"
            self.beyond("spill file", folder.root, len(spills), size, why, unread=True)

    def savepoint(self, folder: Folder, operator: str) -> None:
        """All of a savepoint."""
        entries = folder.tree()
        if not entries:
            raise UsageError(f"there is no savepoint at {folder.root}: look at the path")
        there = MANIFEST_NAME in {entry.name for entry in entries}
        manifest = decode_manifest(folder.get(MANIFEST_NAME), folder.where(MANIFEST_NAME)) if there else None
        schemas = {} if manifest is None else {name: it.row_schema() for name, it in manifest.header.operators.items()}
        mine = {operator, *(name for it, name in self._begun if manifest is not None and it == manifest.header.id)}
        if manifest is not None and mine.isdisjoint(schemas):
            # Which of its keys are these is not known, and bytes tell nothing of keys without text.
            has = ", ".join(sorted(schemas)[:_NAMED_MAX])
            why = (
                f"searched as bytes only: it has no operator {operator!r}, but {has}, and no query below the root "
                "began with it. Scan for the keys of the operator that it has"
            )
            self.beyond("savepoint", folder.root, len(entries), sum(it.size_bytes for it in entries), why, unread=True)
        for entry in entries:
            parts = entry.name.split("/")
            schema = schemas.get(parts[0])
            if is_temporary(parts[-1]):
                self._unfinished(folder, entry, "remove it where nobody writes the savepoint")
            elif entry.name == MANIFEST_NAME and schemas:
                self._pointers("savepoint manifest", folder, entry, None, _saved)
            elif parse_file_name(parts[-1]) is not None and schema is not None and parts[0] in mine:
                self._checkpoint("savepoint file", folder, entry, schema)
            elif parse_file_name(parts[-1]) is not None and schema is None:
                self._bytes("savepoint file", folder, entry)
                self.beyond(
                    "savepoint file",
                    folder.where(entry.name),
                    1,
                    entry.size_bytes,
                    "no manifest tells of it",
                    unread=True,
                )
            else:
                # Other operators have other keys; their rows may mention these all the same.
                self._bytes("other file", folder, entry)

    def local_stores(self, local_dir: Path, operator: str) -> None:
        """All local stores of an operator on this machine, pages that are free included."""
        if not local_dir.is_dir():
            raise UsageError(f"there is no folder {local_dir}: give the local_dir of the ArrowState")
        locks: list[int] = []
        for stores in sorted(local_dir.glob(_STORES)):
            own = re.compile("[0-9a-f]{16}-" + re.escape(operator))
            places = [*(place for place in stores.iterdir() if own.fullmatch(place.name)), stores / "scratch"]
            for path in sorted(file for place in places for file in place.rglob("*") if file.is_file()):
                if path.name == LOCK_FILE and path.with_name(DATA_FILE).exists():
                    # Whoever closes it takes away the locks that LMDB has on it in this process (POSIX), and so its
                    # readers from under a state that is open here.
                    locks.append(path.stat().st_size)
                    continue
                try:
                    size, search = path.stat().st_size, Search(self._wanted)
                    with path.open("rb") as file:

                        def read(start: int, end: int, file: Any = file) -> bytes:
                            file.seek(start)
                            data: bytes = file.read(end - start)
                            return data

                        search.in_file(read, size)
                except FileNotFoundError:  # a query that runs has removed it
                    continue
                except OSError as error:
                    self.beyond("local store", str(path), 1, 0, f"it cannot be read: {error}", unread=True)
                    continue
                self._note("local store", str(stores), str(path), size, search)
        if locks:
            why = f"{LOCK_FILE} of LMDB is not opened: it has numbers of processes and transactions, and no rows"
            self.beyond("local store", str(local_dir), len(locks), sum(locks), why)
        if self._wanted.by_rows_only:
            why = f"{self._wanted.by_rows_only} keys have no text of four bytes and more to search its pages for"
            self.beyond("local store", str(local_dir), 0, 0, why)

    def spark_checkpoint(self, folder: Folder) -> None:
        """What of Spark's checkpoint is no state; that is counted."""
        state: list[Entry] = []
        entries = folder.tree()
        if not entries:
            raise UsageError(f"there is nothing at {folder.root}: give the query's checkpointLocation")
        for entry in entries:
            if entry.name.startswith(_SPARK_STATE):
                state.append(entry)
            else:
                self._bytes("Spark's checkpoint", folder, entry)
        size = sum(entry.size_bytes for entry in state)
        why = (
            "Spark's own state: it may hold deltas of up to inline_bytes_max that no backend had confirmed; Spark "
            "removes them with the batches that it does not retain"
        )
        self.beyond("Spark's checkpoint", folder.where(_SPARK_STATE), len(state), size, why)

    # -- files -------------------------------------------------------------------------------------

    def _unfinished(self, folder: Folder, entry: Entry, what_then: str) -> None:
        """A file that somebody writes, or whose writer died."""
        self._bytes("unfinished file", folder, entry)
        why = f"searched as bytes only: its rows may be compressed; {what_then}"
        self.beyond("unfinished file", folder.where(entry.name), 1, entry.size_bytes, why, unread=True)

    def _checkpoint(self, kind: str, folder: Folder, entry: Entry, schema: RowSchema) -> None:
        name = posixpath.basename(entry.name)
        files = folder.child(*entry.name.split("/")[:-1])
        search = Search(self._wanted)
        try:
            self._rows_of(files, name, schema, search)
            search.in_file(lambda start, end: files.get_range(name, start, end), entry.size_bytes)
        except MissingCheckpointError:  # a query that runs has cleaned up
            return
        except CorruptError as error:
            search.in_file(lambda start, end: files.get_range(name, start, end), entry.size_bytes)
            self.beyond(kind, files.where(name), 1, entry.size_bytes, f"searched as bytes only: {error}", unread=True)
        self._note(kind, folder.root, files.where(name), entry.size_bytes, search)

    def _rows_of(self, files: Readable, name: str, schema: RowSchema, search: Search) -> None:
        rows = 0
        with open_body(files, name, self._scratch) as body:
            for batch in body.reader:
                batch.validate()
                rows += batch.num_rows
                search.in_rows(batch.replace_schema_metadata(None), schema)
        if rows != body.record.rows:
            raise CorruptFileError(f"{files.where(name)} holds {rows} rows and announces {body.record.rows}")

    def _request(self, folder: Folder, entry: Entry) -> None:
        """An erase request, which holds its keys; or the record that one is done."""
        search, where = Search(self._wanted), folder.where(entry.name)
        try:
            data = folder.get(entry.name)
            search.in_bytes(data)
            if not entry.name.endswith(".json"):
                search.in_batch(decode_request(data, where).keys)
        except MissingCheckpointError:
            return
        except CorruptError as error:
            self.beyond("erase request", where, 1, entry.size_bytes, f"searched as bytes only: {error}", unread=True)
        self._note("erase request", folder.root, where, entry.size_bytes, search)

    def _pointers(
        self,
        kind: str,
        folder: Folder,
        entry: Entry,
        schema: RowSchema | None,
        decode: Callable[[bytes, str], Iterator[tuple[Pointer, RowSchema | None]]],
    ) -> None:
        """A file of pointers, in which there may be deltas."""
        search, where = Search(self._wanted), folder.where(entry.name)
        try:
            data = folder.get(entry.name)
            search.in_bytes(data)
            for pointer, told in decode(data, where):
                search.in_bytes(pointer.encode())
                self._inline(pointer, told or schema, where, search)
        except MissingCheckpointError:
            return
        except CorruptError as error:
            self.beyond(kind, where, 1, entry.size_bytes, f"searched as bytes only: {error}", unread=True)
        self._note(kind, folder.root, where, entry.size_bytes, search)

    def _inline(self, pointer: Pointer, schema: RowSchema | None, where: str, search: Search) -> None:
        for delta in pointer.inline:
            assert schema is not None, "whoever has pointers knows the operator"
            files = SealedFiles([SealedFile.of(delta.name, delta.data)], f"in {where}")
            assert delta.name.endswith(f"{DELTA}.arrow"), "only deltas go inline"
            self._rows_of(files, delta.name, schema, search)

    def _bytes(self, kind: str, folder: Folder, entry: Entry) -> None:
        search = Search(self._wanted)
        try:
            search.in_file(lambda start, end: folder.get_range(entry.name, start, end), entry.size_bytes)
        except MissingCheckpointError:
            return
        self._note(kind, folder.root, folder.where(entry.name), entry.size_bytes, search)


def _captured(data: bytes, where: str) -> Iterator[tuple[Pointer, RowSchema | None]]:
    yield from ((pointer, None) for pointer in Captured.decode(data, where).pointers.values())


def _noted(data: bytes, where: str) -> Iterator[tuple[Pointer, RowSchema | None]]:
    yield Pointer.decode(data), None


def _saved(data: bytes, where: str) -> Iterator[tuple[Pointer, RowSchema | None]]:
    manifest = decode_manifest(data, where)
    for saved in manifest.buckets:
        yield saved.pointer, manifest.header.operators[saved.operator].row_schema()
