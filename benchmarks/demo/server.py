"""Start and kill a Spark Connect server as a child process, from the PySpark that pip installed."""

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
    """The server cannot be started, reached or used."""


def spark_home() -> Path:
    """Return the folder of the PySpark that pip installed, which contains a complete Spark."""
    spec = importlib.util.find_spec("pyspark")
    locations = list(spec.submodule_search_locations or []) if spec else []
    home = Path(locations[0]) if locations else Path()
    if not (home / "bin" / "spark-submit").exists():
        raise ServerError(
            "this environment has no Spark to start a server with. Either run pip install 'pyspark[connect]', "
            "or start a server elsewhere and give its address: --remote sc://host:15002"
        )
    if not list((home / "jars").glob("spark-connect_*.jar")):
        raise ServerError("this PySpark has no Connect server: install a PySpark of version 4.0 or later with pip")
    return home


class Server:
    """A Spark Connect server, which `start` starts; ``with Server(...)`` kills all its processes at the end.

    Parameters
    ----------
    folder : Path
        The folder in which it runs and writes its logs and temporary files.
    cores : int
        The number of tasks that it runs at once.
    conf : mapping
        Additional Spark configuration.
    """

    def __init__(self, folder: Path, cores: int, conf: Mapping[str, str]) -> None:
        self.folder = folder
        self.cores = cores
        self.conf = dict(conf)
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        # Without a token, every user of this machine could run code in the name of the server's user.
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
        """The URL to which a client connects."""
        return f"sc://localhost:{self.port}/;token={self.token}"

    @property
    def log(self) -> Path:
        """The log of the server that was started last."""
        return self.folder / f"server-{self.starts}.log"

    def start(self) -> None:
        """Start the server, and return when it accepts connections."""
        home = spark_home()
        self.kill()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = find_free_port()
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
        # This is what start-connect-server.sh runs, but as a child process instead of a daemon.
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        # Give the server a POSIX session of its own: all its processes are in it, whatever process groups they create.
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
        """Return the environment variables of the server: those of this process, with this Spark and this Python."""
        environment = {name: value for name, value in os.environ.items() if name != "SPARK_REMOTE"}
        here = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
        environment["SPARK_HOME"] = str(home)
        environment["PYSPARK_PYTHON"] = sys.executable
        environment["SPARK_CONNECT_AUTHENTICATE_TOKEN"] = self.token
        return environment

    def _wait(self) -> None:
        """Wait until the server accepts connections."""
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"the server ended while it was starting; the end of its log:\n{self.last_words()}")
            try:
                with socket.create_connection(("localhost", self.port), timeout=1):
                    return
            except OSError:
                time.sleep(0.1)
        self.kill()
        raise ServerError(
            f"the server did not listen within {START_SECONDS:.0f} s; the end of its log:\n{self.last_words()}"
        )

    def check(self) -> None:
        """Raise an error if the server is not running."""
        if self.process is None or self.process.poll() is not None:
            raise ServerError(f"the server has ended; the end of its log:\n{self.last_words()}")

    def last_words(self, lines: int = 15) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> int:
        """Kill all processes of the server with SIGKILL, and return how many there were."""
        if self.process is None:
            return 0
        # Kill the JVM first, because it would replace a worker that died.
        killed = [pid for pid in [self.process.pid, *list_processes(self.process.pid)] if kill(pid)]
        deadline = time.monotonic() + 10
        while (remaining := list_processes(self.process.pid)) and time.monotonic() < deadline:
            killed += [pid for pid in remaining if kill(pid)]
            time.sleep(0.05)
        self.process.wait()
        self.process = None
        return len(set(killed))


def check_reachable(url: str) -> None:
    """Raise an error if no server listens at a Connect URL, because a client would retry for ten minutes."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "sc" or not parts.hostname:
        raise ServerError(f"{url} is not the address of a Connect server: give one like sc://host:15002")
    try:
        with socket.create_connection((parts.hostname, parts.port or 15002), timeout=10):
            return
    except OSError as error:
        raise ServerError(f"no server answers at {parts.hostname}:{parts.port or 15002}: {error}") from error


def find_free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def kill(pid: int) -> bool:
    """Kill a process with SIGKILL, and return whether it existed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def list_processes(session: int) -> list[int]:
    """Return the ids of the living processes of a POSIX session.

    Spark's Python daemon creates another process group, so that killing the server's group would miss it.
    """
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The fields after the name in parentheses are state, parent, group and session.
            state, _, _, process_session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended meanwhile
        if int(process_session) == session and state != "Z":
            processes.append(int(entry.name))
    return processes
