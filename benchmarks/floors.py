"""The floors below the peers: what storage engines alone take for the job of `benchmarks.counting`.

No stream processor is around them and no function is called for each key: a batch's values are added up by NumPy (by
SQL, for DuckDB), then the state of each key is read, changed and written. Each engine makes a batch durable as it does
by default, and says how. ``cp`` is the floor of the floors: the changed rows of a batch are there as an Arrow file, and
that is copied and synced.

Each floor is a program of its own (``python -m benchmarks.floors LMDB ...``, see `benchmarks.peers.protocol`).
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
    """What is safe once a batch is done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, files: list[Path]) -> None:  # noqa: B027, most have nothing to prepare
        """What has to be there before the clock starts."""

    @abstractmethod
    def batch(self, files: list[Path]) -> pa.Table:
        """Process one batch; returns the rows to put out: ``key``, ``n``, ``total``."""

    @abstractmethod
    def answer(self) -> tuple[Keys, Values]:
        """All keys and states, from the engine opened again."""

    def close(self) -> None:  # noqa: B027, some have nothing to close
        """Close it."""


class _Entries(Floor):
    """An engine of keys and values: aggregate, read each key, write each key."""

    @abstractmethod
    def update(self, keys: list[bytes], change: Callable[[list[bytes]], list[bytes]]) -> None:
        """Read keys (ascending, `_EMPTY` for what is not there), let them be changed, and write them."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Everything."""

    def batch(self, files: list[Path]) -> pa.Table:
        """Process one batch."""
        keys, added = _summed(_read(files))
        states: list[Values] = []

        def change(found: list[bytes]) -> list[bytes]:
            state = np.frombuffer(b"".join(found), dtype=_VALUE).copy()
            state["n"] += added["n"]
            state["total"] += added["total"]
            states.append(state)
            return _split(state)

        self.update(_split(keys.astype(_KEY)), change)
        return pa.table({"key": keys, "n": states[0]["n"], "total": states[0]["total"]})

    def answer(self) -> tuple[Keys, Values]:
        """Everything, as arrays."""
        keys, values = zip(*self.entries(), strict=True)
        plain = np.frombuffer(b"".join(keys), dtype=_KEY).astype(np.int64)
        return plain, np.frombuffer(b"".join(values), dtype=_VALUE)


class Lmdb(_Entries):
    """LMDB, an entry a key, one transaction a batch."""

    durability = "committed and synced to disk"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._env = lmdb.open(str(folder), map_size=_MAP_BYTES)

    def update(self, keys: list[bytes], change: Callable[[list[bytes]], list[bytes]]) -> None:
        """In one transaction."""
        with self._env.begin(write=True) as txn:
            cursor = txn.cursor()
            get = cursor.get
            found = [get(key, _EMPTY) for key in keys]
            cursor.putmulti(zip(keys, change(found), strict=True))

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Everything."""
        with lmdb.open(str(self.folder), map_size=_MAP_BYTES, readonly=True) as env, env.begin() as txn:
            yield from txn.cursor()

    def close(self) -> None:
        """Close it."""
        self._env.close()


class LmdbUnsynced(Lmdb):
    """The same as a cache: nothing is synced."""

    durability = "none: committed, left to the system to write"

    def __init__(self, folder: Path) -> None:
        Floor.__init__(self, folder)
        self._env = lmdb.open(str(folder), map_size=_MAP_BYTES, sync=False, metasync=False, readahead=False)


class RocksDb(_Entries):
    """RocksDB through rocksdict, an entry a key: one read of many keys, one write batch."""

    durability = "in the write-ahead log, not synced"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._db = self._open()

    def _open(self) -> Any:
        from rocksdict import Options, Rdict

        return Rdict(str(self.folder), Options(raw_mode=True))

    def update(self, keys: list[bytes], change: Callable[[list[bytes]], list[bytes]]) -> None:
        """In one write batch."""
        from rocksdict import WriteBatch

        found = self._db[keys]
        writes = WriteBatch(raw_mode=True)
        put = writes.put
        for key, value in zip(keys, change([value or _EMPTY for value in found]), strict=True):
            put(key, value)
        self._db.write(writes)

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Everything."""
        db = self._open()
        yield from db.items()
        db.close()

    def close(self) -> None:
        """Close it."""
        self._db.close()


_SUMS = "SELECT key, count(*) AS n, sum(value) AS total FROM read_parquet($files) GROUP BY key"
_CHANGED = f"""CREATE OR REPLACE TEMP TABLE changed AS
    SELECT b.key, b.n + coalesce(s.n, 0) AS n, b.total + coalesce(s.total, 0) AS total
    FROM ({_SUMS}) AS b LEFT JOIN state AS s USING (key)"""


class DuckDb(Floor):
    """DuckDB, a table without an index: changed rows are deleted and inserted, in one transaction."""

    durability = "committed, synced to disk and checkpointed"
    table = "CREATE TABLE state (key BIGINT, n BIGINT, total DOUBLE)"
    statements: tuple[str, ...] = (
        _CHANGED,
        # MERGE takes as long with a million keys, and many times as long with 50,000.
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
        """Process one batch, in SQL from the files on."""
        named = {"files": [str(path) for path in files]}
        for statement in self.statements:
            self._connection.execute(statement, named if "$files" in statement else None)
        rows = self._connection.sql(self.out).to_arrow_table()
        self._connection.execute("CHECKPOINT")
        return rows

    def answer(self) -> tuple[Keys, Values]:
        """Everything."""
        with self._duckdb.connect(self._path, read_only=True) as connection:
            found = connection.execute("SELECT key, n, total FROM state").fetchnumpy()
        values = np.empty(len(found["key"]), dtype=_VALUE)
        values["n"], values["total"] = found["n"], found["total"]
        return np.asarray(found["key"], dtype=np.int64), values

    def close(self) -> None:
        """Close it."""
        self._connection.close()


class DuckDbUpsert(DuckDb):
    """DuckDB, a table with a primary key and INSERT ... ON CONFLICT DO UPDATE."""

    table = "CREATE TABLE state (key BIGINT PRIMARY KEY, n BIGINT, total DOUBLE)"
    statements = (
        f"CREATE OR REPLACE TEMP TABLE changed AS {_SUMS}",
        """INSERT INTO state SELECT key, n, total FROM changed
        ON CONFLICT (key) DO UPDATE SET n = n + excluded.n, total = total + excluded.total""",
    )
    # RETURNING would give the rows, and takes many times as long.
    out = "SELECT state.* FROM state SEMI JOIN changed USING (key)"


class Copy(Floor):
    """``cp`` of a file with the changed rows of the batch, as Arrow, and fsync of the copy."""

    durability = "copied and synced to disk, its folder entry not"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._keys: Keys = np.empty(0, dtype=np.int64)
        self._values: Values = np.empty(0, dtype=_VALUE)
        self._batch = 0
        (folder / "from").mkdir()
        (folder / "to").mkdir()

    def prepare(self, files: list[Path]) -> None:
        """Make the file with the changed rows."""
        keys, added = _summed(_read(files))
        known = np.isin(keys, self._keys, assume_unique=True)
        at = np.searchsorted(self._keys, keys[known])
        changed = added.copy()
        for name in ("n", "total"):
            changed[name][known] += self._values[name][at]
        self._values[at] = changed[known]
        all_keys = np.concatenate([self._keys, keys[~known]])
        order = np.argsort(all_keys)
        self._keys, self._values = all_keys[order], np.concatenate([self._values, changed[~known]])[order]
        table = pa.table({"key": keys, "n": changed["n"], "total": changed["total"]})
        with ipc.new_file(self._path("from"), table.schema) as writer:
            writer.write_table(table)

    def _path(self, folder: str) -> str:
        return str(self.folder / folder / f"{self._batch:05d}.arrow")

    def batch(self, files: list[Path]) -> pa.Table:
        """Copy it."""
        source, target = self._path("from"), self._path("to")
        self._batch += 1
        shutil.copyfile(source, target)
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        with pa.memory_map(source) as mapped:
            return ipc.open_file(mapped).read_all()

    def answer(self) -> tuple[Keys, Values]:
        """The last row of each key in the copies."""
        newest: dict[int, tuple[int, float]] = {}
        for path in sorted((self.folder / "to").iterdir()):
            with pa.memory_map(str(path)) as mapped:
                rows = ipc.open_file(mapped).read_all()
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
"""The package that each needs."""


def _read(files: list[Path]) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in files])


def _summed(events: pa.Table) -> tuple[Keys, Values]:
    """Each key, ascending, and the count and sum of its values."""
    keys, values = events["key"].to_numpy(), events["value"].to_numpy()
    # Sorting is faster here than Arrow's hash aggregation, and the engines want their keys sorted anyway.
    order = np.argsort(keys)
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    sums = np.empty(len(starts), dtype=_VALUE)
    sums["n"] = np.diff(np.append(starts, len(keys)))
    sums["total"] = np.add.reduceat(values[order], starts)
    return keys[starts], sums


def _split(array: npt.NDArray[Any]) -> list[bytes]:
    """Each element's bytes."""
    # A void view is the fastest way to many small bytes objects, and keeps trailing zeros.
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
        put_out = floor.batch(files)
        seconds.append(time.perf_counter() - start)
        rows += put_out.num_rows
    floor.close()
    keys, values = floor.answer()
    package = PACKAGES[task.variant]
    details: dict[str, Any] = {"durability": floor.durability, "rows put out": rows}
    details["bytes of the store"] = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    if package is not None:
        details["version"] = metadata.version(package)
    leave(task, seconds, keys, values["n"], values["total"], details)


def main() -> int:
    """Measure one floor."""
    _measure(read_task(tuple(FLOORS), __doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
