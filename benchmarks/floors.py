"""The floors below the peers: the time that storage engines alone take for the job of `benchmarks.counting`.

There is no stream processor, and no function is called for each key: NumPy adds up a batch's values (DuckDB does so in
SQL), then the engine reads, changes and writes the state of each key. Each engine keeps its default durability, except
that ``LMDB-unsynced`` syncs nothing and DuckDB makes a checkpoint after each batch; the report says how durable a batch
is. ``cp`` is the lowest floor: it only copies an Arrow file with the batch's changed rows, which was written earlier,
and syncs the copy to disk.

Each floor runs as a separate program (``python -m benchmarks.floors LMDB ...``, see `benchmarks.peers.protocol`).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from benchmarks.peers.protocol import Task, leave, read_task

__all__ = ["FLOORS", "PACKAGES"]

_VALUE = np.dtype([("n", "<i8"), ("total", "<f8")])
_EMPTY = bytes(_VALUE.itemsize)
_KEY = np.dtype(">i8")
_MAP_BYTES = 16 << 30

Values = npt.NDArray[np.void]
Keys = npt.NDArray[np.int64]


class Floor(ABC):
    """An engine that keeps the state of each key.

    Parameters
    ----------
    folder
        Folder for its files.
    """

    durability = ""
    """How durable a finished batch is; this text goes into the report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, files: list[Path]) -> None:  # noqa: B027, most have nothing to prepare
        """Prepare for a batch before its time is measured."""

    @abstractmethod
    def batch(self, files: list[Path]) -> pa.Table:
        """Process one batch; return its output rows: ``key``, ``n``, ``total``."""

    @abstractmethod
    def answer(self) -> tuple[Keys, Values]:
        """Return all keys and states as they were written; called after `close`."""

    def close(self) -> None:  # noqa: B027, some have nothing to close
        """Close the engine."""


class _Entries(Floor):
    """A key-value engine: for each batch, add up its values, read its keys, and write them."""

    @abstractmethod
    def update(self, keys: list[bytes], change: Callable[[list[bytes]], list[bytes]]) -> None:
        """Read ascending keys (`_EMPTY` if one does not exist), and write the values that `change` returns."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Open the engine again and iterate over all its entries."""

    def batch(self, files: list[Path]) -> pa.Table:
        """Process one batch."""
        keys, increments = _sum_by_key(_read_events(files))
        states: list[Values] = []

        def change(stored: list[bytes]) -> list[bytes]:
            state = np.frombuffer(b"".join(stored), dtype=_VALUE).copy()
            state["n"] += increments["n"]
            state["total"] += increments["total"]
            states.append(state)
            return _split(state)

        self.update(_split(keys.astype(_KEY)), change)
        return pa.table({"key": keys, "n": states[0]["n"], "total": states[0]["total"]})

    def answer(self) -> tuple[Keys, Values]:
        """Return all keys and states."""
        keys, values = zip(*self.entries(), strict=True)
        plain = np.frombuffer(b"".join(keys), dtype=_KEY).astype(np.int64)
        return plain, np.frombuffer(b"".join(values), dtype=_VALUE)


class Lmdb(_Entries):
    """LMDB with one entry for each key and one transaction for each batch."""

    durability = "committed and synced to disk"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._env = lmdb.open(str(folder), map_size=_MAP_BYTES)

    def update(self, keys: list[bytes], change: Callable[[list[bytes]], list[bytes]]) -> None:
        """Read and write keys in one transaction."""
        with self._env.begin(write=True) as txn:
            cursor = txn.cursor()
            get = cursor.get
            stored = [get(key, _EMPTY) for key in keys]
            cursor.putmulti(zip(keys, change(stored), strict=True))

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Open the environment again and iterate over all its entries."""
        with lmdb.open(str(self.folder), map_size=_MAP_BYTES, readonly=True) as env, env.begin() as txn:
            yield from txn.cursor()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


class LmdbUnsynced(Lmdb):
    """LMDB as a cache: like `Lmdb`, but nothing is synced to disk, and without read-ahead."""

    durability = "none: committed, left to the system to write"

    def __init__(self, folder: Path) -> None:
        Floor.__init__(self, folder)
        self._env = lmdb.open(str(folder), map_size=_MAP_BYTES, sync=False, metasync=False, readahead=False)


class RocksDb(_Entries):
    """RocksDB through rocksdict, with one entry for each key; each batch is one multi-key read and one write batch."""

    durability = "in the write-ahead log, not synced"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._db = self._open()

    def _open(self) -> Any:
        from rocksdict import Options, Rdict

        return Rdict(str(self.folder), Options(raw_mode=True))

    def update(self, keys: list[bytes], change: Callable[[list[bytes]], list[bytes]]) -> None:
        """Read keys in one call, and write them in one write batch."""
        from rocksdict import WriteBatch

        stored = self._db[keys]
        writes = WriteBatch(raw_mode=True)
        put = writes.put
        for key, value in zip(keys, change([value or _EMPTY for value in stored]), strict=True):
            put(key, value)
        self._db.write(writes)

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Open the database again and iterate over all its entries."""
        db = self._open()
        yield from db.items()
        db.close()

    def close(self) -> None:
        """Close the database."""
        self._db.close()


_SUMS = "SELECT key, count(*) AS n, sum(value) AS total FROM read_parquet($files) GROUP BY key"
_CHANGED = f"""CREATE OR REPLACE TEMP TABLE changed AS
    SELECT b.key, b.n + coalesce(s.n, 0) AS n, b.total + coalesce(s.total, 0) AS total
    FROM ({_SUMS}) AS b LEFT JOIN state AS s USING (key)"""


class DuckDb(Floor):
    """DuckDB with a table without an index: one transaction deletes the changed rows and inserts the new ones."""

    durability = "committed, synced to disk and checkpointed"
    table = "CREATE TABLE state (key BIGINT, n BIGINT, total DOUBLE)"
    statements: tuple[str, ...] = (
        _CHANGED,
        # With a million keys, MERGE takes as long as these statements; with 50,000 keys, many times as long.
        "BEGIN",
        "DELETE FROM state WHERE key IN (SELECT key FROM changed)",
        "INSERT INTO state SELECT key, n, total FROM changed",
        "COMMIT",
    )
    out = "SELECT key, n, total FROM changed"

    def __init__(self, folder: Path) -> None:
        import duckdb

        super().__init__(folder)
        self._duckdb = duckdb
        self._path = str(folder / "state.duckdb")
        self._connection = duckdb.connect(self._path)
        self._connection.execute(self.table)

    def batch(self, files: list[Path]) -> pa.Table:
        """Process one batch, all in SQL, including the reading of its files."""
        parameters = {"files": [str(path) for path in files]}
        for statement in self.statements:
            self._connection.execute(statement, parameters if "$files" in statement else None)
        rows = self._connection.sql(self.out).to_arrow_table()
        self._connection.execute("CHECKPOINT")
        return rows

    def answer(self) -> tuple[Keys, Values]:
        """Return all keys and states."""
        with self._duckdb.connect(self._path, read_only=True) as connection:
            stored = connection.execute("SELECT key, n, total FROM state").fetchnumpy()
        values = np.empty(len(stored["key"]), dtype=_VALUE)
        values["n"], values["total"] = stored["n"], stored["total"]
        return np.asarray(stored["key"], dtype=np.int64), values

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class DuckDbUpsert(DuckDb):
    """DuckDB with a table with a primary key, and INSERT ... ON CONFLICT DO UPDATE."""

    table = "CREATE TABLE state (key BIGINT PRIMARY KEY, n BIGINT, total DOUBLE)"
    statements = (
        f"CREATE OR REPLACE TEMP TABLE changed AS {_SUMS}",
        """INSERT INTO state SELECT key, n, total FROM changed
        ON CONFLICT (key) DO UPDATE SET n = n + excluded.n, total = total + excluded.total""",
    )
    # RETURNING could return these rows, but takes many times as long.
    out = "SELECT state.* FROM state SEMI JOIN changed USING (key)"


class Copy(Floor):
    """``cp``: a copy of an Arrow file with the batch's changed rows, and an fsync of the copy."""

    durability = "copied and synced to disk, its folder entry not"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._keys: Keys = np.empty(0, dtype=np.int64)
        self._values: Values = np.empty(0, dtype=_VALUE)
        self._batch = 0
        (folder / "from").mkdir()
        (folder / "to").mkdir()

    def prepare(self, files: list[Path]) -> None:
        """Write the file with the batch's changed rows."""
        keys, increments = _sum_by_key(_read_events(files))
        is_known = np.isin(keys, self._keys, assume_unique=True)
        positions = np.searchsorted(self._keys, keys[is_known])
        changed = increments.copy()
        for name in ("n", "total"):
            changed[name][is_known] += self._values[name][positions]
        self._values[positions] = changed[is_known]
        all_keys = np.concatenate([self._keys, keys[~is_known]])
        order = np.argsort(all_keys)
        self._keys, self._values = all_keys[order], np.concatenate([self._values, changed[~is_known]])[order]
        table = pa.table({"key": keys, "n": changed["n"], "total": changed["total"]})
        with ipc.new_file(self._path("from"), table.schema) as writer:
            writer.write_table(table)

    def _path(self, folder: str) -> str:
        return str(self.folder / folder / f"{self._batch:05d}.arrow")

    def batch(self, files: list[Path]) -> pa.Table:
        """Copy the file with the changed rows, sync the copy, and return the rows."""
        source, target = self._path("from"), self._path("to")
        self._batch += 1
        shutil.copyfile(source, target)
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        with pa.memory_map(source) as file_map:
            return ipc.open_file(file_map).read_all()

    def answer(self) -> tuple[Keys, Values]:
        """Return the last row of each key in the copies."""
        newest: dict[int, tuple[int, float]] = {}
        for path in sorted((self.folder / "to").iterdir()):
            with pa.memory_map(str(path)) as file_map:
                rows = ipc.open_file(file_map).read_all()
                pairs = zip(rows["n"].to_pylist(), rows["total"].to_pylist(), strict=True)
                newest.update(zip(rows["key"].to_pylist(), pairs, strict=True))
        return np.array(list(newest), dtype=np.int64), np.array(list(newest.values()), dtype=_VALUE)


FLOORS: dict[str, type[Floor]] = {
    "cp": Copy,
    "LMDB": Lmdb,
    "LMDB-unsynced": LmdbUnsynced,
    "RocksDB": RocksDb,
    "DuckDB": DuckDb,
    "DuckDB-upsert": DuckDbUpsert,
}
PACKAGES = {
    "cp": None,
    "LMDB": "lmdb",
    "LMDB-unsynced": "lmdb",
    "RocksDB": "rocksdict",
    "DuckDB": "duckdb",
    "DuckDB-upsert": "duckdb",
}
"""The package that each floor needs, or None."""


def _read_events(files: list[Path]) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in files])


def _sum_by_key(events: pa.Table) -> tuple[Keys, Values]:
    """Return the distinct keys in ascending order, and the count and sum of each key's values."""
    keys, values = events["key"].to_numpy(), events["value"].to_numpy()
    # Sorting is faster here than Arrow's hash aggregation, and the engines work best with sorted keys anyway.
    order = np.argsort(keys)
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    sums = np.empty(len(starts), dtype=_VALUE)
    sums["n"] = np.diff(np.append(starts, len(keys)))
    sums["total"] = np.add.reduceat(values[order], starts)
    return keys[starts], sums


def _split(array: npt.NDArray[Any]) -> list[bytes]:
    """Return the bytes of each element."""
    # A void view is the fastest way to make many small bytes objects, and it keeps trailing zeros.
    parts: list[bytes] = array.view(np.dtype((np.void, array.dtype.itemsize))).tolist()
    return parts


def _measure(task: Task) -> None:
    folder = task.work / "state"
    folder.mkdir()
    floor = FLOORS[task.variant](folder)
    seconds, rows = [], 0
    for files in task.files():
        floor.prepare(files)
        start = time.perf_counter()
        output = floor.batch(files)
        seconds.append(time.perf_counter() - start)
        rows += output.num_rows
    floor.close()
    keys, values = floor.answer()
    package = PACKAGES[task.variant]
    details: dict[str, Any] = {"durability": floor.durability, "rows put out": rows}
    details["bytes of the store"] = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    if package is not None:
        details["version"] = metadata.version(package)
    leave(task, seconds, keys, values["n"], values["total"], details)


def main() -> int:
    """Measure one floor; return the exit code."""
    _measure(read_task(tuple(FLOORS), __doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
