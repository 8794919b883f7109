"""Names of hosts and machines, and that leases check processes by machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from lease_support import local_run

from spark_state_ext.errors import UsageError
from spark_state_ext.ownership.lease_record import RunIdentity
from spark_state_ext.worker.host import HOST_VARIABLE, host_name, machine_name


def test_the_environment_variable_has_precedence_over_the_systems_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    assert host_name() == machine_name() == os.uname().nodename
    monkeypatch.setenv(HOST_VARIABLE, "node-7.rack-2")
    assert host_name() == "node-7.rack-2"
    assert machine_name() == os.uname().nodename


@pytest.mark.parametrize("name", ["", " ", "a/b", "a\\b", "a\nb", "a\x7fb", "a ", "x" * 151, "ü" * 76])
def test_host_names_that_no_file_can_have_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(HOST_VARIABLE, name)
    with pytest.raises(UsageError, match=f"{HOST_VARIABLE} gives this host the name .* set {HOST_VARIABLE} to"):
        host_name()


def test_an_empty_name_of_the_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    with pytest.raises(UsageError, match="the system gives this machine the name '', which is empty"):
        host_name()


def test_a_host_sees_that_a_run_on_another_host_of_its_machine_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is looked up by its number, which belongs to the machine, whatever the name of its host is."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        monkeypatch.setenv(HOST_VARIABLE, "host-a")
        run = replace(local_run(child.pid), host=RunIdentity.here("application", "plan").host)
        monkeypatch.setenv(HOST_VARIABLE, "host-b")
        assert not run.is_over()
    finally:
        child.communicate()
    assert run.is_over()


def test_a_run_on_another_machine_with_the_same_host_name_is_not_seen_as_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if both have the same boot id, as clones of one image may have."""
    monkeypatch.setenv(HOST_VARIABLE, "one-name")
    run = replace(local_run(), host=RunIdentity.here("application", "plan").host, pid=2**22 - 1)
    assert run.is_over()
    monkeypatch.setattr(socket, "gethostname", lambda: "another-machine")
    assert not run.is_over()
