"""Spark sessions that all tests share: one classic, and one Connect client of a server of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.spark import ROCKSDB
from tests.helpers.costs import Costs
from tests.helpers.jvm import JVM_OPTIONS, LOCAL_FILES
from tests.helpers.soak import SOAK

HERE = Path(__file__).parent
# What executors import besides the package: helper modules of the tests, pickled by reference.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE.parent), str(HERE / "spark"), str(HERE / "third_party"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ.setdefault("SPARK_SUBMIT_OPTS", " ".join(JVM_OPTIONS))

# Where a test does not care, the soak has the provider that large jobs have, and the suite has what starts fast.
_BY_LENGTH = (
    {"spark.sql.streaming.stateStore.providerClass": ROCKSDB}
    if SOAK
    else {**LOCAL_FILES, "spark.python.daemon.module": "tests.helpers.spark_daemon"}
)
CONF = {
    **_BY_LENGTH,
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    # The default of Spark 4: 3.5 refuses times before 1900 in Parquet files.
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.pollingDelay": "5ms",
    "spark.log.level": "ERROR",
}

# What takes long to start is started by one worker: it runs all tests that ask for one of these fixtures.
_ONE_WORKER = {
    "connect": "connect",
    "connect_session": "connect",
    "connect_server": "connect",
    "s3": "stores",
    "azure": "stores",
    "both": "both",
    "built": "built",
}


def pytest_configure(config: pytest.Config) -> None:
    """Count what tests cost, if ``scripts/run_tests.py`` asks for it."""
    results = os.environ.get("SPARK_STATE_EXT_COSTS")
    if results and not config.getoption("numprocesses", None):
        config.pluginmanager.register(Costs(Path(results)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long forms to the soak, and see to it that what takes long to start does so once."""
    left = [item for item in items if item.get_closest_marker("soak")] if not SOAK else []
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        fixtures = getattr(item, "fixturenames", ())
        group = next((group for fixture, group in _ONE_WORKER.items() if fixture in fixtures), None)
        if group or item.get_closest_marker("connect"):
            item.add_marker(pytest.mark.xdist_group(group or "connect"))
    # The longest first, so that no worker is alone with one in the end.
    items.sort(key=lambda item: (not item.get_closest_marker("connect"), not item.get_closest_marker("slow")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test begins in classic mode: with what a Connect session leaves behind, PySpark makes no classic one."""
    os.environ.pop("SPARK_CONNECT_MODE_ENABLED", None)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A classic session on two local cores."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("spark_state_ext tests")
    for name, value in CONF.items():
        builder = builder.config(name, value)
    builder = builder.config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[Any]:
    """An S3 server in a process of its own."""
    from tests.helpers.object_store import s3_server

    with s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An Azure Blob Storage server in a process of its own."""
    from tests.helpers.object_store import azure_server, azurite

    if azurite() is None:
        pytest.skip("azurite-blob is not installed: npm install azurite (make test does it)")
    with azure_server(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A standalone master and two workers, each a machine of its own."""
    from cluster import Cluster, unusable

    reason = unusable()
    if reason is not None:
        pytest.skip(f"no Spark cluster can run here: {reason}")
    with Cluster(tmp_path_factory.mktemp("cluster").resolve()) as made:
        yield made


@pytest.fixture(scope="session")
def connect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Connect server in a process of its own."""
    from pyspark import __version__

    if int(__version__.split(".")[0]) < 4:
        pytest.skip("the pip package of PySpark 3.5 holds no Connect server; Connect is tested from 4.0 on")
    from benchmarks.demo.server import Server

    with Server(tmp_path_factory.mktemp("connect"), 2, CONF) as server:
        server.start()
        yield server


@pytest.fixture(scope="session")
def connect_session(connect_server: Any) -> Iterator[Any]:
    """A Connect session."""
    from pyspark.sql.connect.session import SparkSession

    session = SparkSession.builder.remote(connect_server.url).create()
    yield session
    session.stop()


@pytest.fixture
def connect(connect_session: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Connect session, with this process's PySpark in Connect mode while the test runs."""
    # pyspark.sql.functions asks this variable which kind of Column to make; a client process has only one kind.
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    _start_again_where_spark_gave_up(monkeypatch)
    return connect_session


def _start_again_where_spark_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a query anew whose `foreachBatch` function has no process yet.

    The server waits ten seconds for that, which no setting changes (Spark's `PythonWorkerFactory`); a machine with thirty
    times its load takes longer. Nothing of ours has run by then.
    """
    from pyspark.sql.connect.streaming.readwriter import DataStreamWriter

    start = DataStreamWriter.start

    def started(writer: Any, *args: Any, **options: Any) -> Any:
        for _ in range(10):
            try:
                return start(writer, *args, **options)
            except Exception as error:
                if "Python worker failed to connect back" not in str(error):
                    raise
        return start(writer, *args, **options)

    monkeypatch.setattr(DataStreamWriter, "start", started)


@pytest.fixture(
    params=[
        pytest.param("classic", marks=pytest.mark.spark),
        pytest.param("connect", marks=[pytest.mark.spark, pytest.mark.connect]),
    ]
)
def session(request: pytest.FixtureRequest) -> Any:
    """Each kind of session in turn."""
    return request.getfixturevalue("spark" if request.param == "classic" else "connect")


@pytest.fixture(params=[pytest.param("spark", marks=pytest.mark.parity), "arrow"])
def operator(request: pytest.FixtureRequest) -> str:
    """Whose operator runs the job: Spark's own or ours."""
    kind: str = request.param
    return kind


@pytest.fixture
def clock(life: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The life's clock, on which no time passes but what the test lets pass."""
    from spark_state_ext.commit.uploads import WorkerUploads
    from tests.helpers.clock import VirtualClock

    life.clock_s = made = VirtualClock()
    monkeypatch.setattr(WorkerUploads, "pause", lambda _, uploads, timeout_s: made.pause(uploads, timeout_s))
    return made


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Any]:
    """A bucket that lives from batch to batch."""
    from life import Life

    made = Life(tmp_path)
    yield made
    for manager in made.managers.values():
        manager.gate.set()
    made.settle()
    for store in made.stores:
        store.close()
