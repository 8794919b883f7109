"""A real Spark cluster on this machine: a standalone master and its workers, each a process like a separate machine.

Each worker has its own address, disk and, if the system allows it, host name, boot id and process numbers. All workers see
only their own disk, under the same path `Cluster.local_dir`: state that moves comes from the checkpoint.
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
# Less memory than any executor needs.
_BYSTANDER_MB = 64
# The queries are short, so that compiling code that runs only a few times would waste time. Workers whose process numbers
# all begin at 1 must not share files that are named by such numbers.
_JAVA = " ".join((*JVM_OPTIONS, "-XX:-UsePerfData"))
# Arguments: host name, disk, its mount point, the file with the boot id, and the command.
_AS_A_MACHINE = (
    'hostname "$1" && mount --bind "$2" "$3" && mount --bind "$4" /proc/sys/kernel/random/boot_id || exit 1; '
    'shift 4; "$@" & wait $!'
)


def unusable() -> str | None:
    """Return the reason why no cluster can run here, as text for the user; None if one can."""
    if not Path("/proc/self/cwd").exists():
        return "this system has no /proc, which is needed to find and kill executors"
    try:
        spark_home()
    except ServerError as error:
        return str(error)
    return None


def make_namespace_command() -> list[str]:
    # Only root can do this without a user namespace.
    mapped = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *mapped, "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


def make_machine_command(name: str, disk: Path, local_dir: Path, boot_file: Path) -> list[str]:
    arguments = [name, str(disk), str(local_dir), str(boot_file)]
    return [*make_namespace_command(), "sh", "-c", _AS_A_MACHINE, "sh", *arguments]


def cannot_isolate(folder: Path) -> str | None:
    """Return the reason why processes cannot have their own host name, boot id and process numbers; None if they can.

    Parameters
    ----------
    folder
        Folder for a trial.
    """
    disk, boot_file = folder / "trial-disk", folder / "trial-boot"
    disk.mkdir(parents=True, exist_ok=True)
    boot_file.write_text("trial\n")
    try:
        command = [*make_machine_command("trial", disk, disk, boot_file), "cat", "/proc/sys/kernel/random/boot_id"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return str(error)
    finally:
        shutil.rmtree(disk)
        boot_file.unlink()
    return None if done.stdout == "trial\n" else done.stderr.strip() or "the process saw another boot id"


@dataclass
class WorkerNode:
    """A worker of the cluster.

    Parameters
    ----------
    name
        Its host name, and its variable ``CLUSTER_WORKER``, which its executors and their Python processes inherit.
    address
        Its address for Spark.
    folder
        Folder for all files of the worker.
    started
        The process of the worker, or of its namespaces.
    disks_lost
        Number of disks that it has lost; a test renames a disk to take it away.
    """

    name: str
    address: str
    folder: Path
    started: subprocess.Popen[bytes] | None = None
    disks_lost: int = 0

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Return the process of the worker, or of its namespaces."""
        assert self.started is not None
        return self.started

    @property
    def disk(self) -> Path:
        """Return the folder that its executors see as `Cluster.local_dir`."""
        return self.folder / "disk"

    def executors(self) -> list[int]:
        """Return the process ids of the JVMs of its executors."""
        return [pid for pid in descendants(self.process.pid) if is_java(pid, _EXECUTOR)]

    def daemon(self) -> int:
        """Return the process id of the worker's own JVM."""
        processes = (self.process.pid, *descendants(self.process.pid))
        (pid,) = [process for process in processes if is_java(process, f"{_WORKER} ")]
        return pid


def is_java(pid: int, kind: str) -> bool:
    command = command_of(pid)
    return command.partition(" ")[0].endswith("/java") and kind in command


class Cluster:
    """A master and workers; ``with Cluster(...)`` ends all of their processes.

    Parameters
    ----------
    folder
        Folder for all files.
    workers
        Number of workers.
    cores
        Number of tasks that each worker runs at a time.
    memory_mb
        Memory of an executor in MiB.
    isolated
        True if workers have their own host names, boot ids and process numbers; None if the system's permissions decide.
    bystanders
        Number of workers, the last ones, that have too little memory for an executor.

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
        """Return a path that for each worker's executors leads to that worker's disk."""
        # Spark starts an executor, and the executor its Python, three folders below the worker's folder.
        return str(self.folder / "local") if self.isolated else "/proc/self/cwd/../../../disk"

    @property
    def conf(self) -> dict[str, str]:
        """Return the settings with which an application uses the whole cluster and no other resources."""
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
            # A job begins when all executors are registered.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "240s",
            "spark.ui.enabled": "false",
            "spark.local.dir": str(self.folder / "driver-scratch"),
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
        }

    def driver(self, script: Path, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a driver as a process, with the Python that has the wheel.

        Parameters
        ----------
        script, arguments
            What it runs.
        log
            The file to which its output is appended.
        """
        # Executors use the Python that the driver's environment names.
        variables = {"PYSPARK_PYTHON": str(self.python)}
        return self._start([str(self.python), "-W", "ignore", str(script), *arguments], log, variables)

    def kill_driver(self, driver: subprocess.Popen[bytes]) -> None:
        """Kill a driver with its JVM, and return when its executors have ended too."""
        kill_tree(driver.pid)
        driver.wait()
        wait_until(lambda: not any(worker.executors() for worker in self.workers), "executors end with their driver")

    def kill_executors(self, worker: WorkerNode, *, python_too: bool = True, lose_disk: bool = False) -> int:
        """Kill a worker's executors with SIGKILL; the worker starts new ones.

        Parameters
        ----------
        worker
            The worker.
        python_too
            Also kill their Python processes. Otherwise these continue until they notice the death of their executor.
        lose_disk
            Also empty the worker's disk, before it can start another executor.

        Returns
        -------
        int
            The number of killed executors.
        """
        daemon = worker.daemon()
        # While the worker is stopped, it does not start another executor.
        os.kill(daemon, signal.SIGSTOP)
        try:
            doomed = worker.executors()
            for pid in doomed:
                if python_too:
                    kill_tree(pid)
                else:
                    os.kill(pid, signal.SIGKILL)
            if lose_disk:
                empty_folder(worker.disk)
        finally:
            os.kill(daemon, signal.SIGCONT)
        return len(doomed)

    def kill_worker(self, worker: WorkerNode, *, lose_disk: bool = True) -> float:
        """Kill a worker with its executors, their Python processes and all other processes on it.

        Parameters
        ----------
        worker
            Which.
        lose_disk
            Also rename its disk. Otherwise the machine only boots again.

        Returns
        -------
        float
            The time at which the kill began, in seconds since 1970.
        """
        dead_s = time.time()
        kill_tree(worker.process.pid)
        worker.process.wait()
        if lose_disk:
            worker.disks_lost += 1
            worker.disk.rename(worker.folder / f"disk-lost-{worker.disks_lost}")
        return dead_s

    def restart_worker(self, worker: WorkerNode) -> None:
        """Start a killed worker again, with an empty disk if it lost its own, and wait until it has registered."""
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
        """Start a process on the machine of a worker; it ends with that machine at the latest.

        Parameters
        ----------
        worker
            Which.
        command
            What it runs.
        log
            The file to which its output is appended.
        variables
            Additional environment variables; like an executor, the process also gets the worker's name.
        """
        inside = ["nsenter", "--target", str(worker.daemon()), "--mount", "--uts", "--pid"] if self.isolated else []
        return self._start([*inside, *command], log, {**make_variables(worker), **variables})

    def calls(self) -> pa.Table:
        """Return the package's metrics from the disks of all workers, with a column ``worker``, ordered by their ends."""
        tables = []
        for worker in self.workers:
            calls = metrics.read(worker.disk)
            tables.append(calls.append_column("worker", pa.array([worker.name] * calls.num_rows, pa.string())))
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
        environment = {**clean_environment(), **variables}
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
            # The name of an isolated host cannot be resolved to an address.
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
            match = re.search(r"Starting Spark master at (spark://\S+)", log.read_text(errors="replace"))
            self.url = match[1] if match else ""
            return bool(match)

        wait_until(listens, f"the master starts; see {log}")

    def _start_worker(self, number: int, name: str) -> None:
        # Spark does not start a speculative attempt on the host of the first one, so each worker has its own address.
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
        """Start the machine of a worker, with an empty disk if it has none, and the worker on it."""
        folder, command = worker.folder, self._commands[worker.name]
        worker.disk.mkdir(exist_ok=True)
        if self.isolated:
            local_dir, boot_file = Path(self.local_dir), folder / "boot_id"
            local_dir.mkdir(exist_ok=True)
            boot_file.write_text(f"{uuid.uuid4()}\n")
            command = [*make_machine_command(worker.name, worker.disk, local_dir, boot_file), *command]
        variables = {**self._daemon_variables(worker.address), **make_variables(worker)}
        worker.started = self._start(command, folder / "worker.log", variables)


def make_variables(worker: WorkerNode) -> dict[str, str]:
    """Return the environment variables of a worker's processes."""
    folders = {"SPARK_LOCAL_DIRS": str(worker.folder / "scratch"), "TMPDIR": str(worker.folder)}
    return {"CLUSTER_WORKER": worker.name, "SPARK_STATE_EXT_HOST": worker.name, **folders}


def empty_folder(folder: Path) -> None:
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
