"""Spark sessions and other fixtures that all tests share: a classic session, and a client of a Connect server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.spark import ROCKSDB
from tests.helpers.costs import Costs
from tests.helpers.jvm import JVM_OPTIONS, LOCAL_FILES, write_no_checksums
from tests.helpers.soak import SOAK

HERE = Path(__file__).parent
# In addition to the package, executors import helper modules of the tests, which are pickled by reference.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE.parent), str(HERE / "spark"), str(HERE / "third_party"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ.setdefault("SPARK_SUBMIT_OPTS", " ".join(JVM_OPTIONS))

# By default the soak uses the state store provider of large jobs, and the suite the settings that start fast.
_BY_LENGTH = (
    {"spark.sql.streaming.stateStore.providerClass": ROCKSDB}
    if SOAK
    else {**LOCAL_FILES, "spark.python.daemon.module": "tests.helpers.spark_daemon"}
)
CONF = {
    **_BY_LENGTH,
    # A batch with one task costs a sixth less. The soak has two, as have tests that set the number themselves.
    "spark.sql.shuffle.partitions": "2" if SOAK else "1",
    "spark.ui.enabled": "false",
    # This is the default of Spark 4; without it, Spark 3.5 refuses times before 1900 in Parquet files.
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.pollingDelay": "5ms",
    "spark.log.level": "ERROR",
}

# By default, Hypothesis fails a test if an example takes more than 200 ms, or if it takes a second to make ten examples.
# On a loaded machine, both happen to any test.
settings.register_profile("tests", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# These fixtures take long to start, so one worker runs all tests that use the same one.
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
    """Deselect the long forms outside of the soak, and group the tests of fixtures that take long to start."""
    deselected = [item for item in items if item.get_closest_marker("soak")] if not SOAK else []
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in set(deselected)]
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        fixtures = getattr(item, "fixturenames", ())
        group = next((group for fixture, group in _ONE_WORKER.items() if fixture in fixtures), None)
        if group or item.get_closest_marker("connect"):
            item.add_marker(pytest.mark.xdist_group(group or "connect"))
    # Run the longest tests first, so that no worker still runs one after the others have ended.
    items.sort(key=lambda item: (not item.get_closest_marker("connect"), not item.get_closest_marker("slow")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin each test in classic mode: a Connect session leaves a variable with which PySpark makes no classic session."""
    os.environ.pop("SPARK_CONNECT_MODE_ENABLED", None)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a classic session on two local cores."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("spark_state_ext tests")
    for name, value in CONF.items():
        builder = builder.config(name, value)
    builder = builder.config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
    session = builder.getOrCreate()
    if not SOAK:
        write_no_checksums(session)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[Any]:
    """Start an S3 server in a separate process."""
    from tests.helpers.object_store import s3_server

    with s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start an Azure Blob Storage server in a separate process."""
    from tests.helpers.object_store import azure_server, azurite

    if azurite() is None:
        pytest.skip("azurite-blob is not installed: npm install azurite (make test does it)")
    with azure_server(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a standalone master and two workers, each like a separate machine."""
    from cluster import Cluster, unusable

    reason = unusable()
    if reason is not None:
        pytest.skip(f"no Spark cluster can run here: {reason}")
    with Cluster(tmp_path_factory.mktemp("cluster").resolve()) as running_cluster:
        yield running_cluster


@pytest.fixture(scope="session")
def connect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a Connect server in a separate process."""
    from pyspark import __version__

    if int(__version__.split(".")[0]) < 4:
        pytest.skip("the pip package of PySpark 3.5 holds no Connect server; Connect is tested from 4.0 on")
    from benchmarks.demo.server import Server

    with Server(tmp_path_factory.mktemp("connect"), 2, CONF) as server:
        server.start()
        yield server


@pytest.fixture(scope="session")
def connect_session(connect_server: Any) -> Iterator[Any]:
    """Return a Connect session."""
    from pyspark.sql.connect.session import SparkSession

    session = SparkSession.builder.remote(connect_server.url).create()
    yield session
    session.stop()


@pytest.fixture
def connect(connect_session: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the Connect session, and set this process's PySpark to Connect mode while the test runs."""
    # pyspark.sql.functions reads this variable to choose the kind of Column; a client process has only one kind.
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    retry_lost_python_workers(monkeypatch)
    return connect_session


def retry_lost_python_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a query again if the process of its `foreachBatch` function did not start in time.

    The server waits ten seconds for this process, which no setting changes (Spark's `PythonWorkerFactory`); an overloaded
    machine takes longer. None of our code has run by then.
    """
    from pyspark.sql.connect.streaming.readwriter import DataStreamWriter

    start = DataStreamWriter.start

    def start_with_retries(writer: Any, *args: Any, **options: Any) -> Any:
        for _ in range(10):
            try:
                return start(writer, *args, **options)
            except Exception as error:
                if "Python worker failed to connect back" not in str(error):
                    raise
        return start(writer, *args, **options)

    monkeypatch.setattr(DataStreamWriter, "start", start_with_retries)


@pytest.fixture(
    params=[
        pytest.param("classic", marks=pytest.mark.spark),
        pytest.param("connect", marks=[pytest.mark.spark, pytest.mark.connect]),
    ]
)
def session(request: pytest.FixtureRequest) -> Any:
    """Return each kind of session in turn."""
    return request.getfixturevalue("spark" if request.param == "classic" else "connect")


@pytest.fixture(params=[pytest.param("spark", marks=pytest.mark.parity), "arrow"])
def operator(request: pytest.FixtureRequest) -> str:
    """Return the operator that runs the job: Spark's own ("spark") or ours ("arrow")."""
    kind: str = request.param
    return kind


@pytest.fixture
def clock(life: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the clock of `life` by one that only the test moves."""
    from spark_state_ext.commit.uploads import WorkerUploads
    from tests.helpers.clock import VirtualClock

    life.clock_s = virtual_clock = VirtualClock()
    monkeypatch.setattr(WorkerUploads, "pause", lambda _, uploads, timeout_s: virtual_clock.pause(uploads, timeout_s))
    return virtual_clock


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Any]:
    """Return a bucket over many batches."""
    from life import Life

    bucket_life = Life(tmp_path)
    yield bucket_life
    for manager in bucket_life.managers.values():
        manager.gate.set()
    bucket_life.settle()
    for store in bucket_life.stores:
        store.close()
