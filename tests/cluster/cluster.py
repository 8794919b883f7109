"""A real Spark cluster on this machine: a standalone master and its workers, each a process and a machine of its own.

Each worker has an address, a disk and, where the system allows it, a host name, a boot and process numbers of its own.
All workers find their own disk under the same path, `Cluster.local_dir`, and no other's: state that moves comes from the
checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pyarrow as pa
from processes import command_of, descendants, kill_tree, wait_until
from wheel_environment import clean_environment, make_environment

from benchmarks.demo.server import ServerError, spark_home
from spark_state_ext.worker import metrics
from tests.helpers.jvm import JVM_OPTIONS

__all__ = ["Cluster", "WorkerNode", "cannot_isolate", "unusable"]

_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
_EXECUTOR = "CoarseGrainedExecutorBackend"
# Less than any executor has.
_BYSTANDER_MB = 64
# Short queries: time is better spent than on compiling well what runs a few times. Workers that count their processes
# from 1 must not share files that are named by such numbers.
_JAVA = " ".join((*JVM_OPTIONS, "-XX:-UsePerfData"))
# Arguments: host name, disk, where it is seen, the file with the boot, and what to run.
_AS_A_MACHINE = (
    'hostname "$1" && mount --bind "$2" "$3" && mount --bind "$4" /proc/sys/kernel/random/boot_id || exit 1; '
    'shift 4; "$@" & wait $!'
)


def unusable() -> str | None:
    """Why no cluster can run here, in words for the user; None when one can."""
    if not Path("/proc/self/cwd").exists():
        return "this system has no /proc, by which executors are found and killed"
    try:
        spark_home()
    except ServerError as error:
        return str(error)
    return None


def _in_namespaces() -> list[str]:
    # Only root needs no names of its own for that.
    mapped = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *mapped, "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


def _as_a_machine(name: str, disk: Path, local_dir: Path, boot_file: Path) -> list[str]:
    given = [name, str(disk), str(local_dir), str(boot_file)]
    return [*_in_namespaces(), "sh", "-c", _AS_A_MACHINE, "sh", *given]


def cannot_isolate(folder: Path) -> str | None:
    """Why processes cannot get a host name, a boot and process numbers of their own; None when they can.

    Parameters
    ----------
    folder
        For a trial.
    """
    disk, boot_file = folder / "trial-disk", folder / "trial-boot"
    disk.mkdir(parents=True, exist_ok=True)
    boot_file.write_text("trial\n")
    try:
        command = [*_as_a_machine("trial", disk, disk, boot_file), "cat", "/proc/sys/kernel/random/boot_id"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return str(error)
    finally:
        shutil.rmtree(disk)
        boot_file.unlink()
    return None if done.stdout == "trial\n" else done.stderr.strip() or "another boot was seen"


@dataclass
class WorkerNode:
    """A worker of the cluster.

    Parameters
    ----------
    name
        Its host name, and its variable ``CLUSTER_WORKER``, which its executors and their Python inherit.
    address
        What Spark knows it by.
    folder
        For all that it writes.
    started
        The worker, or what keeps it apart.
    disks_lost
        How many of its disks were renamed away.
    """

    name: str
    address: str
    folder: Path
    started: subprocess.Popen[bytes] | None = None
    disks_lost: int = 0

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The worker, or what keeps it apart."""
        assert self.started is not None
        return self.started

    @property
    def disk(self) -> Path:
        """The folder that its executors see as `Cluster.local_dir`."""
        return self.folder / "disk"

    def executors(self) -> list[int]:
        """The JVMs of its executors."""
        return [pid for pid in descendants(self.process.pid) if _is_java(pid, _EXECUTOR)]

    def daemon(self) -> int:
        """The worker's own JVM."""
        (pid,) = [it for it in (self.process.pid, *descendants(self.process.pid)) if _is_java(it, f"{_WORKER} ")]
        return pid


def _is_java(pid: int, kind: str) -> bool:
    command = command_of(pid)
    return command.partition(" ")[0].endswith("/java") and kind in command


class Cluster:
    """A master and workers; ``with Cluster(...)`` makes sure that nothing of them is left.

    Parameters
    ----------
    folder
        For everything.
    workers
        How many.
    cores
        How many tasks each runs at once.
    memory_mb
        Memory of an executor, MiB.
    isolated
        Workers have host names, boots and process numbers of their own. None: where the system allows it.
    bystanders
        How many of the workers, the last ones, have too little memory for an executor.

    Examples
    --------
    >>> with Cluster(tmp_path) as cluster:  # doctest: +SKIP
    ...     driver = cluster.driver(script, ["--an", "argument"], log)
    ...     cluster.kill_executors(cluster.workers[0])
    """

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        cores: int = 1,
        memory_mb: int = 512,
        isolated: bool | None = None,
        bystanders: int = 0,
    ) -> None:
        self.folder = folder
        self.cores = cores
        self.memory_mb = memory_mb
        self.isolated = cannot_isolate(folder) is None if isolated is None else isolated
        self.workers: list[WorkerNode] = []
        self.url = ""
        self.python = Path()
        self._names = [f"worker-{number}" for number in range(1, workers + 1)]
        self._with_executors = workers - bystanders
        self._home = spark_home()
        self._started: list[subprocess.Popen[bytes]] = []
        self._commands: dict[str, list[str]] = {}

    def __enter__(self) -> Cluster:
        try:
            self.python = make_environment(self.folder / "environment")
            self._start_master()
            for number, name in enumerate(self._names, 1):
                self._start_worker(number, name)
            log = self.folder / "master.log"
            wait_until(
                lambda: log.read_text(errors="replace").count("Registering worker ") == len(self._names),
                f"the workers register with the master; see {log}",
            )
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def local_dir(self) -> str:
        """A path that leads each worker's executors to that worker's disk."""
        # Spark starts an executor, and that its Python, three folders below the worker's.
        return str(self.folder / "local") if self.isolated else "/proc/self/cwd/../../../disk"

    @property
    def conf(self) -> dict[str, str]:
        """What an application needs to use all of the cluster, and nothing outside of it."""
        return {
            "spark.master": self.url,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "640m",
            "spark.driver.extraJavaOptions": _JAVA,
            "spark.executor.memory": f"{self.memory_mb}m",
            "spark.executor.cores": str(self.cores),
            "spark.executor.extraJavaOptions": _JAVA,
            "spark.cores.max": str(self.cores * self._with_executors),
            # A job begins when all executors are there.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "240s",
            "spark.ui.enabled": "false",
            "spark.local.dir": str(self.folder / "driver-scratch"),
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
        }

    def driver(self, script: Path, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a driver with the Python that has the wheel, in a process of its own.

        Parameters
        ----------
        script, arguments
            What it runs.
        log
            The file for its output; added to.
        """
        # Executors run the Python that the driver's environment names.
        variables = {"PYSPARK_PYTHON": str(self.python)}
        return self._start([str(self.python), "-W", "ignore", str(script), *arguments], log, variables)

    def kill_driver(self, driver: subprocess.Popen[bytes]) -> None:
        """Kill a driver with its JVM, and return when its executors have ended too."""
        kill_tree(driver.pid)
        driver.wait()
        wait_until(lambda: not any(worker.executors() for worker in self.workers), "executors end with their driver")

    def kill_executors(self, worker: WorkerNode, *, python_too: bool = True, lose_disk: bool = False) -> int:
        """Kill a worker's executors with SIGKILL; the worker starts others.

        Parameters
        ----------
        worker
            Whose.
        python_too
            Their Python processes are killed with them. Otherwise these find out by themselves, and work on until then.
        lose_disk
            What is on the worker's disk goes too, before another executor can be started.

        Returns
        -------
        int
            How many were killed.
        """
        daemon = worker.daemon()
        # While it stands still it starts no other.
        os.kill(daemon, signal.SIGSTOP)
        try:
            doomed = worker.executors()
            for pid in doomed:
                if python_too:
                    kill_tree(pid)
                else:
                    os.kill(pid, signal.SIGKILL)
            if lose_disk:
                _empty(worker.disk)
        finally:
            os.kill(daemon, signal.SIGCONT)
        return len(doomed)

    def kill_worker(self, worker: WorkerNode, *, lose_disk: bool = True) -> float:
        """Kill a worker with its executors, their Python processes and all else on it.

        Parameters
        ----------
        worker
            Which.
        lose_disk
            Its disk is taken away. Otherwise the machine only boots anew.

        Returns
        -------
        float
            When it began to die, seconds since 1970.
        """
        dead_s = time.time()
        kill_tree(worker.process.pid)
        worker.process.wait()
        if lose_disk:
            worker.disks_lost += 1
            worker.disk.rename(worker.folder / f"disk-lost-{worker.disks_lost}")
        return dead_s

    def restart_worker(self, worker: WorkerNode) -> None:
        """Start a worker that was killed again, with an empty disk if it lost its own, and wait until the master knows it."""
        log = self.folder / "master.log"
        before = log.read_text(errors="replace").count("Registering worker ")
        self._launch_worker(worker)
        wait_until(
            lambda: log.read_text(errors="replace").count("Registering worker ") > before,
            f"{worker.name} registers with the master again; see {log}",
        )

    def run_on(
        self, worker: WorkerNode, command: Sequence[str], log: Path, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process on the machine that a worker is; it ends with that machine at the latest.

        Parameters
        ----------
        worker
            Which.
        command
            What it runs.
        log
            The file for its output; added to.
        variables
            Added to its environment, which tells the worker's name as that of its executors does.
        """
        inside = ["nsenter", "--target", str(worker.daemon()), "--mount", "--uts", "--pid"] if self.isolated else []
        return self._start([*inside, *command], log, {**_names_of(worker), **variables})

    def calls(self) -> pa.Table:
        """The package's metrics from the disks of all workers, with a column ``worker``, in the order of their ends."""
        tables = []
        for worker in self.workers:
            found = metrics.read(worker.disk)
            tables.append(found.append_column("worker", pa.array([worker.name] * found.num_rows, pa.string())))
        return pa.concat_tables(tables).sort_by([("ended_ms", "ascending")])

    def stop(self) -> None:
        """Kill everything that was started."""
        while self._started:
            process = self._started.pop()
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
        self.workers.clear()

    # -- processes ---------------------------------------------------------------------------------

    def _start(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        environment = {**clean_environment(), "PYTHONDONTWRITEBYTECODE": "1", **variables}
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def _daemon_variables(self, address: str) -> dict[str, str]:
        return {
            "SPARK_HOME": str(self._home),
            "SPARK_CONF_DIR": str(self.folder),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{_JAVA} -Dspark.master.rest.enabled=false -Dspark.ui.enabled=false",
            # An isolated host's own name leads to no address.
            "SPARK_LOCAL_IP": address,
            "SPARK_LOCAL_HOSTNAME": address,
        }

    def _start_master(self) -> None:
        log = self.folder / "master.log"
        command = [str(self._home / "bin" / "spark-class"), _MASTER]
        command += ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        master = self._start(command, log, self._daemon_variables("127.0.0.1"))

        def listens() -> bool:
            if master.poll() is not None:
                raise RuntimeError(f"the master ended: {log.read_text(errors='replace')[-2000:]}")
            found = re.search(r"Starting Spark master at (spark://\S+)", log.read_text(errors="replace"))
            self.url = found[1] if found else ""
            return bool(found)

        wait_until(listens, f"the master starts; see {log}")

    def _start_worker(self, number: int, name: str) -> None:
        # Spark starts no speculative attempt on the host of the first one, so each has an address of its own.
        address, folder = f"127.0.0.{number + 1}", self.folder / name
        for inner in ("scratch", "work"):
            (folder / inner).mkdir(parents=True)
        memory_mb = self.memory_mb + 256 if number <= self._with_executors else _BYSTANDER_MB
        command = [str(self._home / "bin" / "spark-class"), _WORKER, "--host", address, "--port", "0"]
        command += ["--webui-port", "0", "--cores", str(self.cores), "--memory", f"{memory_mb}m"]
        self._commands[name] = [*command, "--work-dir", str(folder / "work"), self.url]
        worker = WorkerNode(name, address, folder)
        self._launch_worker(worker)
        self.workers.append(worker)

    def _launch_worker(self, worker: WorkerNode) -> None:
        """Start the machine that a worker is, with an empty disk if it has none, and the worker on it."""
        folder, command = worker.folder, self._commands[worker.name]
        worker.disk.mkdir(exist_ok=True)
        if self.isolated:
            local_dir, boot_file = Path(self.local_dir), folder / "boot_id"
            local_dir.mkdir(exist_ok=True)
            boot_file.write_text(f"{uuid.uuid4()}\n")
            command = [*_as_a_machine(worker.name, worker.disk, local_dir, boot_file), *command]
        variables = {**self._daemon_variables(worker.address), **_names_of(worker)}
        worker.started = self._start(command, folder / "worker.log", variables)


def _names_of(worker: WorkerNode) -> dict[str, str]:
    """What processes of a worker have in their environment."""
    folders = {"SPARK_LOCAL_DIRS": str(worker.folder / "scratch"), "TMPDIR": str(worker.folder)}
    return {"CLUSTER_WORKER": worker.name, "SPARK_STATE_EXT_HOST": worker.name, **folders}


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
