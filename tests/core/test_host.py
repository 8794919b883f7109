"""What hosts are called, and that leases go by machines."""

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


def test_the_environment_goes_before_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    assert host_name() == machine_name() == os.uname().nodename
    monkeypatch.setenv(HOST_VARIABLE, "node-7.rack-2")
    assert host_name() == "node-7.rack-2"
    assert machine_name() == os.uname().nodename


@pytest.mark.parametrize("name", ["", " ", "a/b", "a\\b", "a\nb", "a\x7fb", "a ", "x" * 151, "ü" * 76])
def test_names_that_no_file_can_have_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(HOST_VARIABLE, name)
    with pytest.raises(UsageError, match=f"{HOST_VARIABLE} gives this host the name .* set {HOST_VARIABLE} to"):
        host_name()


def test_so_are_those_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    with pytest.raises(UsageError, match="the system gives this machine the name '', which is empty"):
        host_name()


def test_two_hosts_of_one_machine_see_each_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is looked for by its number, which counts for the machine, whatever its host is called."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        monkeypatch.setenv(HOST_VARIABLE, "host-a")
        its = replace(local_run(child.pid), host=RunIdentity.here("application", "plan").host)
        monkeypatch.setenv(HOST_VARIABLE, "host-b")
        assert not its.is_over()
    finally:
        child.communicate()
    assert its.is_over()


def test_two_machines_of_one_hosts_name_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where neither has a boot of its own to tell, as clones of one image may not."""
    monkeypatch.setenv(HOST_VARIABLE, "one-name")
    its = replace(local_run(), host=RunIdentity.here("application", "plan").host, pid=2**22 - 1)
    assert its.is_over()
    monkeypatch.setattr(socket, "gethostname", lambda: "another-machine")
    assert not its.is_over()
