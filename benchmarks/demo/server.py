"""A Spark Connect server as a child process, from the PySpark that pip installed."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

START_SECONDS = 120.0


class ServerError(Exception):
    """The server cannot be started in this environment."""


def spark_home() -> Path:
    """Return the folder of the pip-installed PySpark, which is a whole Spark."""
    spec = importlib.util.find_spec("pyspark")
    places = list(spec.submodule_search_locations or []) if spec else []
    home = Path(places[0]) if places else Path()
    if not (home / "bin" / "spark-submit").exists():
        raise ServerError(
            "this environment has no Spark to start a server with. Either pip install 'pyspark[connect]', "
            "or start a server elsewhere and name it: --remote sc://host:15002"
        )
    if not list((home / "jars").glob("spark-connect_*.jar")):
        raise ServerError("the pip package of PySpark has a Connect server from 4.0 on; this one is older")
    return home


class Server:
    """A running Spark Connect server; ``with Server(...)`` makes sure that nothing of it is left.

    Parameters
    ----------
    folder : Path
        Where it runs: logs, scratch files.
    cores : int
        How many tasks it runs at once.
    conf : mapping
        More Spark configuration.
    """

    def __init__(self, folder: Path, cores: int, conf: Mapping[str, str]) -> None:
        self.folder = folder
        self.cores = cores
        self.conf = dict(conf)
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        # Without a token every user of this machine could run code as this one.
        self.token = secrets.token_urlsafe(16)
        self.port = 0

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"sc://localhost:{self.port}/;token={self.token}"

    @property
    def log(self) -> Path:
        """What the server that was started last has written."""
        return self.folder / f"server-{self.starts}.log"

    def start(self) -> None:
        """Start the server and return when it accepts connections."""
        home = spark_home()
        self.kill()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.starts += 1
        conf = {
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.connect.grpc.binding.address": "localhost",
            "spark.driver.host": "localhost",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.log.level": "WARN",
            "spark.local.dir": str(self.folder / "scratch"),
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            **self.conf,
        }
        command = [str(home / "bin" / "spark-submit"), "--master", f"local[{self.cores}]"]
        for name, value in conf.items():
            command += ["--conf", f"{name}={value}"]
        # What start-connect-server.sh runs, but as a child instead of a daemon.
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        # Its own session, so that all its processes are known, whatever groups they make.
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment(home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait()

    def _environment(self, home: Path) -> dict[str, str]:
        """Return the environment of the server: this one, but with this Spark and this Python."""
        environment = {name: value for name, value in os.environ.items() if name != "SPARK_REMOTE"}
        here = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
        environment["SPARK_HOME"] = str(home)
        environment["PYSPARK_PYTHON"] = sys.executable
        environment["SPARK_CONNECT_AUTHENTICATE_TOKEN"] = self.token
        return environment

    def _wait(self) -> None:
        """Return when the server listens."""
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"the server ended while starting; its last words:\n{self.last_words()}")
            try:
                with socket.create_connection(("localhost", self.port), timeout=1):
                    return
            except OSError:
                time.sleep(0.1)
        self.kill()
        raise ServerError(f"the server did not listen after {START_SECONDS:.0f} s:\n{self.last_words()}")

    def check(self) -> None:
        """Raise when the server is not running."""
        if self.process is None or self.process.poll() is not None:
            raise ServerError(f"the server has ended; its last words:\n{self.last_words()}")

    def last_words(self, lines: int = 15) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> int:
        """Kill every process of the server with SIGKILL and return how many there were."""
        if self.process is None:
            return 0
        # The JVM first: it would start a new worker for one that died.
        killed = [pid for pid in [self.process.pid, *members(self.process.pid)] if kill(pid)]
        deadline = time.monotonic() + 10
        while (left := members(self.process.pid)) and time.monotonic() < deadline:
            killed += [pid for pid in left if kill(pid)]
            time.sleep(0.05)
        self.process.wait()
        self.process = None
        return len(set(killed))


def check_reachable(url: str) -> None:
    """Raise when nobody listens at a Connect URL: a client would go on trying for ten minutes."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "sc" or not parts.hostname:
        raise ServerError(f"{url} is not the address of a Connect server, which looks like sc://host:15002")
    try:
        with socket.create_connection((parts.hostname, parts.port or 15002), timeout=10):
            return
    except OSError as error:
        raise ServerError(f"no server answers at {parts.hostname}:{parts.port or 15002}: {error}") from error


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def kill(pid: int) -> bool:
    """Kill a process with SIGKILL and tell whether there was one."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def members(session: int) -> list[int]:
    """Return the living processes of a session.

    Spark's Python daemon makes a process group of its own, so killing the server's group would miss it.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # After the name in parentheses: state, parent, group, session.
            state, _, _, of, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(of) == session and state != "Z":
            found.append(int(entry.name))
    return found
