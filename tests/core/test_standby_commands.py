"""The commands of standby, and the files for systemd and Kubernetes that call them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from reading_support import Job
from standby_hosts import BUCKETS, Hosts, changes, job_of, keys_of

from spark_state_ext.peers.settings import SECRET_VARIABLE
from spark_state_ext.standby.values import FollowedRoot
from tests.helpers.waiting import WAIT_S, eventually

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "docs" / "operating" / "standby"
# The prefix of commented-out lines that turn on peers.
PEERS = "# peers: "


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with job_of(tmp_path) as job:
        yield job


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "spark_state_ext", "standby", *arguments]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def test_the_standby_service_runs_as_a_process(tmp_path: Path, job: Job) -> None:
    for number in range(2):
        job.batch(changes(number))
    root = str(tmp_path / "root")
    done = run("settings", root, "--heartbeat", "0.2", "-o", "json")
    assert json.loads(done.stdout) == {"enabled": True, "standby_replicas": 1, "heartbeat_s": 0.2}
    assert run("status", root).returncode == 1
    (tmp_path / "c").mkdir()
    environment = {**os.environ, "SPARK_STATE_EXT_HOST": "c"}
    # The default command is `run`.
    service = subprocess.Popen(
        command(f"{root}/", "--local-dir", str(tmp_path / "c"), "--port", "0", "--address", "127.0.0.1"),
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    try:
        assert service.stderr is not None
        line = service.stderr.readline()
        assert line.startswith(f"standby of {root}/ on c; port "), line
        done = run("status", root, "--wait", "--timeout", str(WAIT_S), "--replicas", "-o", "json")
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)
        assert [(row["bucket"], row["active"], row["host"], row["in_sync"]) for row in rows] == [
            (bucket, "a", "c", True) for bucket in range(BUCKETS)
        ]
        # A task of a job whose root has the trailing slash finds the stores in the same folders.
        stores = FollowedRoot(f"{root}/", {}, str(tmp_path / "c"))
        assert all(stores.store_folder(key, 0).is_dir() for key in keys_of(job))
        # A heartbeat may be late on a slow machine. A command that looks just then sees no live service.
        eventually(lambda: run("status", root, "--safe-to-remove", "a").returncode == 0)

        def names_known_hosts() -> bool:
            done = run("status", root, "--safe-to-remove", "a.example.org")
            assert done.returncode == 2
            assert "there is no host a.example.org" in done.stderr
            return done.stderr.rstrip().endswith("Known hosts: a, c")

        eventually(names_known_hosts)
        port = line.split("port ")[1].split()[0]

        def is_healthy() -> bool:
            """Return False while the service has stood still for ten heartbeats, which are only two seconds here."""
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
                    return bool(answer.status == 200)
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                return False

        eventually(is_healthy)
        service.send_signal(signal.SIGTERM)
        assert service.wait(WAIT_S) == 0
        lines = service.stderr.read().splitlines()
        assert (
            sum(" INFO the copy of bucket " in line and " is restored up to version 2: " in line for line in lines)
            == BUCKETS
        )
        assert lines[-1] == "stopped"
    finally:
        service.kill()
        service.wait()
    done = run("status", root, "-o", "jsonl")
    assert done.returncode == 1
    hosts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(host["host"], host["alive"], host["replicas"]) for host in hosts] == [("c", False, 0)]


def test_status_and_settings_work_before_the_first_batch(tmp_path: Path, job: Job) -> None:
    root = str(tmp_path / "root")
    done = run("status", root)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no state below {root}, and no standby service" in done.stderr
    done = run("status", root, "--wait", "--timeout", "0.1")
    assert done.returncode == 1
    assert f"there are no buckets below {root} yet" in done.stderr
    done = run("settings", root, "--heartbeat", "0.2", "-o", "json")
    assert json.loads(done.stdout)["heartbeat_s"] == 0.2
    assert f"no job has written to {root} yet" in done.stderr
    waiting = subprocess.Popen(
        command("status", root, "--wait", "-o", "json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert waiting.stderr is not None
        assert f"waiting: no job has written to {root} yet" in waiting.stderr.readline()
        job.batch(changes(0))
        assert f"waiting: no standby service of {root} is alive" in waiting.stderr.readline()
        hosts = Hosts(tmp_path, "c")
        while waiting.poll() is None:
            hosts.clock.sleep(0.1)
            hosts.running["c"].turn()
            time.sleep(0.05)
        hosts.end("c")
        output = waiting.communicate()
        assert (waiting.returncode, json.loads(output[0])[-1]["in_sync"]) == (0, BUCKETS), output
    finally:
        waiting.kill()
        waiting.wait()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["run", "{0}/root", "{0}/root/", "--local-dir", "{0}/c"], "{0}/root and {0}/root/ are the same root"),
        (["run", "root", "--local-dir", "{0}/c"], "the root must be a URL or an absolute path"),
        (["run", "{0}/root", "--local-dir", "c"], "--local-dir must be an absolute path"),
        (["status", "{0}", "--timeout", "3"], "--timeout limits how long --wait waits"),
        # A misspelt command is not mistaken for a root.
        (["statsu", "{0}"], "No such command 'statsu'"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path: Path, arguments: list[str], why: str) -> None:
    done = run(*(argument.format(tmp_path) for argument in arguments))
    assert done.returncode == 2
    assert why.format(tmp_path) in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_status_fails_if_an_operator_file_is_unreadable(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    (path,) = Path(job.folder.root).glob("operator_*.json")
    path.write_bytes(b"damaged")
    done = run("status", str(tmp_path / "root"))
    assert (done.returncode, done.stdout) == (3, "")
    assert str(path) in done.stderr
    done = run("settings", str(tmp_path / "root"), "--off", "-o", "json")
    assert done.stderr == ""
    assert json.loads(done.stdout)["enabled"] is False


def test_an_unusable_local_folder_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file")
    done = run("run", str(tmp_path / "root"), "--local-dir", str(tmp_path / "c"))
    assert done.returncode == 3
    assert f"the local folder {tmp_path / 'c'}/spark_state_ext-{os.getuid()} cannot be used" in done.stderr


def test_a_used_peer_port_is_an_error_of_one_line(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.flight", reason="this PyArrow has no Flight")
    secret = {SECRET_VARIABLE: "0123456789abcdef"}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = run(str(tmp_path / "root"), "--local-dir", str(tmp_path / "c"), "--peer-listen", address, **secret)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert f"peers cannot be answered on {address}" in line


# -- the files for systemd and Kubernetes ---------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not on this machine")
@pytest.mark.parametrize("peers", [False, True])
def test_the_systemd_unit_is_valid(tmp_path: Path, peers: bool) -> None:
    text = (UNITS / "spark-state-ext-standby.service").read_text()
    if peers:
        text = text.replace(PEERS, "")
        assert "--peer-listen" in text
    # systemd verifies that the program and the user exist on this machine.
    program = tmp_path / "spark-state-ext"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "spark-state-ext-standby.service"
    unit.write_text(
        text.replace("/opt/spark/venv/bin/spark-state-ext", str(program)).replace("User=spark", "User=root")
    )
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "spark-state-ext" in line]
    assert complaints == []


@pytest.mark.parametrize("peers", [False, True])
def test_the_daemon_set_runs_the_command(peers: bool) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with moto, whose server other tests need")
    text = (UNITS / "daemonset.yaml").read_text()
    (daemon_set,) = yaml.safe_load_all(text.replace(PEERS, "") if peers else text)
    assert (daemon_set["kind"], daemon_set["apiVersion"]) == ("DaemonSet", "apps/v1")
    pod = daemon_set["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["hostPID"] is True
    assert container["command"] == ["spark-state-ext", "standby", "run"]
    arguments = container["args"]
    given = dict(argument.removeprefix("--").split("=") for argument in arguments[:-1])
    # Typer checks whether the options exist.
    done = run("run", *arguments[:-1], "--help")
    assert done.returncode == 0, done.stderr
    (mount,) = container["volumeMounts"]
    assert given["local-dir"] == mount["mountPath"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert given["port"] == str(ports["metrics"])
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert given.get("peer-listen") == (f"0.0.0.0:{ports['peers']}" if peers else None)
    secrets = [
        entry["valueFrom"]["secretKeyRef"]["name"] for entry in container["env"] if entry["name"] == SECRET_VARIABLE
    ]
    assert len(secrets) == peers
