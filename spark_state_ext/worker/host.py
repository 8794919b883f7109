"""What the host of a process is called, where hosts are told apart: in files' headers, in metrics, and for standby.

A host has one local folder, and one service that keeps copies of buckets in it. What the machine is called need not do:
all machines of an image may have one name, and the containers of one machine may be hosts of their own.
"""

from __future__ import annotations

import os
import socket

from spark_state_ext.errors import UsageError

__all__ = ["HOST_VARIABLE", "host_name", "machine_name"]

HOST_VARIABLE = "SPARK_STATE_EXT_HOST"
# It is a part of file names, which mostly may have 255 bytes.
_BYTES_MAX = 150


def host_name() -> str:
    """Name of this process's host: the environment variable ``SPARK_STATE_EXT_HOST``, else the machine's name."""
    given = os.environ.get(HOST_VARIABLE)
    name = machine_name() if given is None else given
    wrong = _wrong_with(name)
    if wrong:
        source = "the system gives this machine" if given is None else f"{HOST_VARIABLE} gives this host"
        raise UsageError(
            f"{source} the name {name!r}, which {wrong}: set {HOST_VARIABLE} to a name of up to {_BYTES_MAX} bytes, "
            "without control characters, spaces at its ends and slashes, for executors and services of this host alike"
        )
    return name


def machine_name() -> str:
    """What the system calls this machine, or this container: for whoever looks for a process by its number."""
    return socket.gethostname()


def _wrong_with(name: str) -> str:
    if not name:
        return "is empty"
    if "/" in name or "\\" in name:
        return "has a slash"
    if not name.isprintable() or name != name.strip():
        return "has control characters, or spaces at its ends"
    return "is too long" if len(name.encode()) > _BYTES_MAX else ""
