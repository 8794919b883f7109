"""Mistakes that users make, and the first three lines of each error message, on a classic session or over Connect.

``python tests/spark/mistakes.py [--connect] [--only NUMBER …]`` prints them, and fails if a mistake has no message. Each
mistake is a small job that runs until it fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    _TESTS = Path(__file__).parents[1]
    sys.path[:0] = [str(folder) for folder in (_TESTS.parent, _TESTS / "third_party")]
    from tests import conftest

    if "--connect" in sys.argv:
        # pyspark.sql.functions asks this variable which kind of Column to make; see tests/conftest.py.
        os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"

import pandas as pd
from jobs import KEYED, ddl, keyed
from streams import finish, read, write_batches
from watched_store import STORE

from spark_state_ext import ArrowState, Backend, disable, enable
from spark_state_ext.errors import LiveRunError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.ownership.lease_record import RunIdentity
from tests.helpers.waiting import eventually

__all__ = ["MISTAKES", "Mistake", "Place", "message_of", "messages_of", "without_ids"]

OUTPUT, STATE = "key string, n bigint", "n bigint"
LEASE_MS = 500
# Lease of a run that others must see alive even while the machine is slow.
_LIVE_MS = 3_000
# Number of jobs at a time: such small queries mostly wait.
_THREADS = 4


@dataclass
class Place:
    """The session and the folder of one job.

    Parameters
    ----------
    session
        Session of the job.
    folder
        Folder that no other job uses.
    """

    session: Any
    folder: Path

    def state(self, **options: Any) -> ArrowState:
        """Return Arrow state in the folder; `options` are those of `ArrowState`."""
        root = options.pop("root", str(self.folder / "root"))
        operator = options.pop("operator", "mistaken")
        return ArrowState(
            root, operator, **{"buckets": 1, "lease_ms": LEASE_MS, "local_dir": str(self.folder / "local"), **options}
        )

    def input(self, *keys: str) -> Any:
        """Add a batch of keys to the input and return the stream."""
        return read(self.session, write_batches(self.folder / "in", [keyed(*(keys or ("a",)))]), ddl(KEYED))

    def run(self, out: Any, sink: Callable[[Any, int], None] | None = None) -> None:
        """Run a query over all input."""
        writer = out.writeStream.outputMode("update").option("checkpointLocation", str(self.folder / "checkpoint"))
        writer = writer.format("noop") if sink is None else writer.foreachBatch(sink)
        finish(writer.trigger(availableNow=True).start())

    def pandas(
        self,
        function: Callable[..., Any],
        state: str = STATE,
        timeout: str = "NoTimeout",
        sink: Callable[[Any, int], None] | None = None,
        **options: Any,
    ) -> None:
        """Run a function that gets pandas frames of one key."""
        out = self.state(**options).apply_in_pandas_with_state(
            self.input(), "key", function, OUTPUT, state, "update", timeout
        )
        self.run(out, sink)

    def rows(self, function: Callable[..., Any]) -> None:
        """Run a function that gets plain rows of one key."""
        self.run(self.state().apply_rows_with_state(self.input(), "key", function, OUTPUT, STATE))

    def arrow(self, function: Callable[..., Any]) -> None:
        """Run a function that gets Arrow tables."""
        self.run(self.state().apply_in_arrow_with_state(self.input(), "key", function, OUTPUT, STATE))


Run = Callable[[Place], None]


@dataclass(frozen=True)
class Mistake:
    """A mistake and its error message.

    Parameters
    ----------
    name
        Short description.
    run
        Makes the mistake.
    sentence
        A regular expression of our sentence, which follows Spark's own words in the first line.
    own
        The user's line of code, which comes next; empty if no line is at fault.
    client
        True if the client refuses it before Spark runs anything.
    sink
        True if an action of `foreachBatch` raises it, which Spark reports first.
    """

    name: str
    run: Run
    sentence: str
    own: str = ""
    client: bool = False
    sink: bool = False


def count(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[Any]:
    n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
    state.update((n,))
    yield key[0], n


# -- in the user's function ---------------------------------------------------------------------------------


def misspelt_column(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[Any]:
    yield key[0], sum(int(pdf["vlaue"].sum()) for pdf in pdfs)


def state_of_the_wrong_type(key: Any, pdfs: Any, state: Any) -> Any:
    state.update(("many",))
    return []


def state_that_is_not_a_tuple(key: Any, pdfs: Any, state: Any) -> Any:
    state.update(5)
    return []


def state_that_is_too_long(key: Any, pdfs: Any, state: Any) -> Any:
    state.update((1, 2))
    return []


def output_of_the_wrong_type(key: Any, pdfs: Any, state: Any) -> Any:
    yield key[0], "many"


def output_that_is_too_short(key: Any, pdfs: Any, state: Any) -> Any:
    yield (key[0],)


def one_row_alone(key: Any, pdfs: Any, state: Any) -> Any:
    return key[0], 1


def misnamed_column(key: Any, pdfs: Any, state: Any) -> Any:
    yield pd.DataFrame({"key": [key[0]], "N": [1]})


def look_up(table: dict[str, int], key: str) -> int:
    return table[key]


def helper_that_fails(key: Any, pdfs: Any, state: Any) -> Any:
    yield key[0], look_up({"b": 1}, key[0])


class OddError(Exception):
    """An exception that can be neither built from a text nor pickled."""

    def __init__(self, code: int, *, reason: str) -> None:
        self.code, self.reason = code, reason

    def __str__(self) -> str:
        return f"code {self.code}, {self.reason}"


def error_of_an_odd_class(key: Any, pdfs: Any, state: Any) -> Any:
    raise OddError(7, reason="no such aircraft")


def timeout_without_its_conf(key: Any, pdfs: Any, state: Any) -> Any:
    state.setTimeoutDuration(1_000)
    return []


def state_that_was_removed(key: Any, pdfs: Any, state: Any) -> Any:
    state.update((1,))
    state.remove()
    yield key[0], state.get[0]


def rows_of_the_wrong_type(key: Any, rows: Any, state: Any) -> Any:
    yield key.key, "many"


def misspelt_column_of_a_table(batch: Any) -> Any:
    return {"key": batch.keys["key"], "n": batch.rows["vlaue"]}


def missing_output_column(batch: Any) -> Any:
    return {"key": batch.keys["key"]}


def misspelt_column_in_a_sink(place: Place) -> None:
    place.pandas(misspelt_column, sink=_collect)


def _collect(df: Any, batch: int) -> None:
    df.collect()


# -- in the job ---------------------------------------------------------------------------------------------


def root_that_is_a_file(place: Place) -> None:
    (place.folder / "root").write_text("")
    place.pandas(count)


def local_folder_that_is_a_file(place: Place) -> None:
    (place.folder / "local").write_text("")
    place.pandas(count)


def other_buckets_at_a_restart(place: Place) -> None:
    place.pandas(count)
    place.pandas(count, buckets=2)


def other_schema_at_a_restart(place: Place) -> None:
    place.pandas(count)
    place.pandas(count, state="n string")


def unknown_kind_of_backend(place: Place) -> None:
    place.state(backends=["fsspec", Backend(name="other", kind="sqlitee")])


def misspelt_storage_option(place: Place) -> None:
    place.state(root="s3://bucket/root", storage_options={"secert": "…"})


def grouped_before_enable(place: Place) -> None:
    df = place.input()
    with contextlib.ExitStack() as undo:
        # A user makes this mistake before the first `enable` of a process; here another test may have called it already.
        group_by = getattr(type(df).groupBy, "__wrapped__", type(df).groupBy)
        grouped = group_by(df, "key")
        enable(place.session, place.state())
        undo.callback(disable, place.session)
        grouped.applyInPandasWithState(count, OUTPUT, STATE, "update", "NoTimeout")


def two_operators_of_one_name(place: Place) -> None:
    state = place.state()
    once = state.apply_in_pandas_with_state(place.input(), "key", count, OUTPUT, STATE, "append", "NoTimeout")
    twice = state.apply_in_pandas_with_state(once, "key", count, OUTPUT, STATE, "append", "NoTimeout")
    finish(twice.writeStream.format("noop").outputMode("append").trigger(availableNow=True).start())


def store_that_refuses(place: Place) -> None:
    (place.folder / "refuses").touch()
    options = {"implementation": STORE, "refuses": str(place.folder / "refuses")}
    place.pandas(count, backends=["fsspec"], storage_options=options)


def another_live_driver(place: Place) -> None:
    place.pandas(count, lease_ms=_LIVE_MS)
    query_folder = next((place.folder / "root" / "mistaken").glob("*/lease")).parent
    other = RunIdentity("another application", "another plan", query_folder.name, "elsewhere")
    held: list[Lease] = []

    def is_held() -> bool:
        # The driver of the first run renews its lease until it notices that the query has ended.
        with contextlib.suppress(LiveRunError):
            lease = Lease(Folder(str(query_folder)), other, _LIVE_MS)
            lease.hold()
            held.append(lease)
        return bool(held)

    eventually(is_held)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(_LIVE_MS / 10_000):
            held[0].hold()

    renewing = threading.Thread(target=renew, daemon=True)
    renewing.start()
    try:
        place.pandas(count, lease_ms=_LIVE_MS)
    finally:
        over.set()
        renewing.join()


KEY = r"key \('a',\)"
PLACE = r"bucket 0, batch 0"
MISTAKES = [
    Mistake(
        "a misspelt column of a frame",
        lambda place: place.pandas(misspelt_column),
        rf"UserFunctionError: the function failed for {KEY} \({PLACE}\): KeyError: 'vlaue'",
        'pdf["vlaue"]',
    ),
    Mistake(
        "a state of the wrong type",
        lambda place: place.pandas(state_of_the_wrong_type),
        rf"StateValueError: state column 'n' of type bigint cannot hold 'many' \(str\) \({KEY}, {PLACE}\)",
        "def state_of_the_wrong_type(key",
    ),
    Mistake(
        "update(5)",
        lambda place: place.pandas(state_that_is_not_a_tuple),
        rf"StateValueError: update\(\) was given 5 and the state has the columns n: .*\({KEY}, {PLACE}\)",
        "state.update(5)",
    ),
    Mistake(
        "a state that is too long",
        lambda place: place.pandas(state_that_is_too_long),
        rf"StateValueError: update\(\) was given \(1, 2\) and the state has the columns n: .*\({KEY}, {PLACE}\)",
        "state.update((1, 2))",
    ),
    Mistake(
        "an output row with text for a number",
        lambda place: place.pandas(output_of_the_wrong_type),
        rf"ResultTypeError: output column 'n' of type bigint cannot hold 'many' \(str\), .*\({KEY}, {PLACE}\)",
        "def output_of_the_wrong_type(key",
    ),
    Mistake(
        "an output row that is too short",
        lambda place: place.pandas(output_that_is_too_short),
        rf"ResultTypeError: the function gave \('a',\) for a row; expected a tuple of key, n \({KEY}, {PLACE}\)",
        "def output_that_is_too_short(key",
    ),
    Mistake(
        "one row instead of a list of rows",
        lambda place: place.pandas(one_row_alone),
        rf"ResultTypeError: the function gave 'a' \(str\) for a row: return, or yield, .*\({KEY}, {PLACE}\)",
        "def one_row_alone(key",
    ),
    Mistake(
        "a misnamed output column",
        lambda place: place.pandas(misnamed_column),
        rf"StateValueError: the function gave a frame with the columns key, N; .* no 'N': .*\({KEY}, {PLACE}\)",
        "def misnamed_column(key",
    ),
    Mistake(
        "a KeyError deep in a helper",
        lambda place: place.pandas(helper_that_fails),
        rf"UserFunctionError: the function failed for {KEY} \({PLACE}\): KeyError: 'a'",
        "return table[key]",
    ),
    Mistake(
        "an exception of an odd class",
        lambda place: place.pandas(error_of_an_odd_class),
        rf"UserFunctionError: the function failed for {KEY} \({PLACE}\): OddError: code 7, no such aircraft",
        'raise OddError(7, reason="no such aircraft")',
    ),
    Mistake(
        "a timeout without timeoutConf",
        lambda place: place.pandas(timeout_without_its_conf),
        rf"UserFunctionError: the function failed for {KEY} \({PLACE}\): (PySpark\w*|Runtime)Error: .*[Tt]imeout",
        "state.setTimeoutDuration(1_000)",
    ),
    Mistake(
        "a state that was removed",
        lambda place: place.pandas(state_that_was_removed),
        rf"UserFunctionError: the function failed for {KEY} \({PLACE}\): \w+: .*removed",
        "state.get[0]",
    ),
    Mistake(
        "a row with text for a number",
        lambda place: place.rows(rows_of_the_wrong_type),
        rf"StateValueError: output column 'n' of type bigint cannot hold 'many' \(str\) .*\({KEY}, {PLACE}\)",
        "def rows_of_the_wrong_type(key",
    ),
    Mistake(
        "a misspelt column of a table",
        lambda place: place.arrow(misspelt_column_of_a_table),
        r"UserFunctionError: the function failed for StateBatch\(1 rows of 1 keys, .*bucket 0, batch 0\): KeyError",
        'batch.rows["vlaue"]',
    ),
    Mistake(
        "a missing output column",
        lambda place: place.arrow(missing_output_column),
        rf"StateValueError: the function gave the columns key; expected key, n \({PLACE}\)",
        "def missing_output_column(batch",
    ),
    Mistake(
        "a misspelt column, and an action of foreachBatch",
        misspelt_column_in_a_sink,
        rf"UserFunctionError: the function failed for {KEY} \({PLACE}\): KeyError: 'vlaue'",
        'pdf["vlaue"]',
        sink=True,
    ),
    Mistake(
        "a root that is a file",
        root_that_is_a_file,
        r"StorageError: .*root.*: .*A root must be a folder that every executor can create, write to and read",
    ),
    Mistake(
        "a local folder that is a file",
        local_folder_that_is_a_file,
        r"StorageError: the local folder .*local.* cannot be used: .*Set local_dir to a writable local disk",
    ),
    Mistake(
        "another number of buckets at a restart",
        other_buckets_at_a_restart,
        r"BucketCountChangedError: operator 'mistaken' has its state in 1 buckets and the job asks for 2: set buckets=1",
    ),
    Mistake(
        "another schema at a restart",
        other_schema_at_a_restart,
        r"SchemaChangedError: .*'n' was int64 and is now string",
    ),
    Mistake(
        "a store that refuses",
        store_that_refuses,
        r"StorageError: writing .*credentials expired",
    ),
    Mistake(
        "another live driver",
        another_live_driver,
        r"LiveRunError: .*Stop the other run",
    ),
    Mistake(
        "two operators of one name",
        two_operators_of_one_name,
        r"UsageError: operator 'mistaken' is already in this query",
        client=True,
    ),
    Mistake(
        "an unknown kind of backend",
        unknown_kind_of_backend,
        r"UsageError: the backend 'other' is of the kind 'sqlitee', which no package here provides; .*'sqlite' is meant",
        client=True,
    ),
    Mistake(
        "a misspelt storage option",
        misspelt_storage_option,
        r"UsageError: storage_options of the root .* has the option 'secert', .* most likely 'secret' is meant",
        client=True,
    ),
    Mistake(
        "groupBy before enable",
        grouped_before_enable,
        r"UsageError: the session runs applyInPandasWithState on Arrow state, .* Call df.groupBy\(…\) after enable",
        client=True,
    ),
]


def message_of(mistake: Mistake, place: Place) -> str:
    """Make a mistake and return the client's error message; empty if there is no error."""
    try:
        mistake.run(place)
    except Exception as error:
        # Python prints the class of an error that the client raises. Errors from Spark have the class in their text.
        ours = type(error).__module__.startswith("spark_state_ext")
        return f"{type(error).__module__}.{type(error).__qualname__}: {error}" if ours else str(error) or repr(error)
    return ""


def without_ids(text: str) -> str:
    """Return a text without ids, which differ from run to run."""
    return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}", "…", text)


def messages_of(session: Any, folder: Path, mistakes: Sequence[Mistake] = MISTAKES) -> list[str]:
    """Make mistakes in separate folders, several at a time, and return their messages in order.

    The messages have neither ids nor folders, which differ from run to run.
    """
    folders = [folder / f"mistake-{number}" for number in range(1, len(mistakes) + 1)]

    def make(mistake: Mistake, place: Path) -> str:
        place.mkdir()
        text = message_of(mistake, Place(session, place)).replace(str(place), "…")
        return without_ids(text)

    # One at a time: on Connect, Spark starts a process for the sink and waits only a few seconds for it.
    alone = {
        mistake.name: make(mistake, place) for mistake, place in zip(mistakes, folders, strict=True) if mistake.sink
    }
    with ThreadPoolExecutor(_THREADS) as pool:
        others = {
            mistake.name: pool.submit(make, mistake, place)
            for mistake, place in zip(mistakes, folders, strict=True)
            if not mistake.sink
        }
    return [alone[mistake.name] if mistake.sink else others[mistake.name].result() for mistake in mistakes]


@contextlib.contextmanager
def _session(connect: bool, folder: Path) -> Iterator[Any]:
    conf = {**conftest.CONF, "spark.sql.shuffle.partitions": "1", "spark.sql.warehouse.dir": str(folder / "warehouse")}
    if connect:
        from pyspark.sql.connect.session import SparkSession as ConnectSession

        from benchmarks.demo.server import Server

        with Server(folder / "server", 2, conf) as server:
            server.start()
            session = ConnectSession.builder.remote(server.url).create()
            yield session
            session.stop()
        return
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]")
    for name, value in conf.items():
        builder = builder.config(name, value)
    classic = builder.getOrCreate()
    yield classic
    classic.stop()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", action="store_true", help="use Spark Connect")
    parser.add_argument("--lines", type=int, default=3, help="number of lines to print of each message")
    parser.add_argument(
        "--only", type=int, nargs="+", default=range(1, len(MISTAKES) + 1), help="numbers of the mistakes to make"
    )
    arguments = parser.parse_args()
    mistakes = [MISTAKES[number - 1] for number in arguments.only]
    with tempfile.TemporaryDirectory() as base, _session(arguments.connect, Path(base)) as session:
        texts = messages_of(session, Path(base), mistakes)
    for number, mistake, text in zip(arguments.only, mistakes, texts, strict=True):
        print(f"{number}. {mistake.name}")
        for line in text.split("\n")[: arguments.lines]:
            print(f"    {line}")
        print(flush=True)
    silent = [mistake.name for mistake, text in zip(mistakes, texts, strict=True) if not text.strip()]
    if silent:
        sys.exit(f"no error message for: {', '.join(silent)}")


if __name__ == "__main__":
    _main()
