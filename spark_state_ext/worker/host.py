"""The name of a process's host, by which file headers, metrics and standby services distinguish hosts.

A host has one local folder, and one standby service that keeps copies of buckets in it. The machine's name may be
unsuitable: all machines of an image may have the same name, and each container of a machine may be a separate host.
"""

from __future__ import annotations

import os
import socket

from spark_state_ext.errors import UsageError

__all__ = ["HOST_VARIABLE", "host_name", "machine_name"]

HOST_VARIABLE = "SPARK_STATE_EXT_HOST"
# The name is a part of file names, which most file systems limit to 255 bytes.
_BYTES_MAX = 150


def host_name() -> str:
    """Return the name of this process's host: the variable ``SPARK_STATE_EXT_HOST``, else the machine's name."""
    configured = os.environ.get(HOST_VARIABLE)
    name = machine_name() if configured is None else configured
    fault = _find_fault(name)
    if fault:
        source = "the system gives this machine" if configured is None else f"{HOST_VARIABLE} gives this host"
        raise UsageError(
            f"{source} the name {name!r}, which {fault}: set {HOST_VARIABLE} to a name of up to {_BYTES_MAX} bytes "
            "without slashes, control characters, or spaces at its ends; use the same name for the executors and "
            "services of this host"
        )
    return name


def machine_name() -> str:
    """Return the system's name of this machine or container, which identifies where a process id is valid."""
    return socket.gethostname()


def _find_fault(name: str) -> str:
    if not name:
        return "is empty"
    if "/" in name or "\\" in name:
        return "has a slash"
    if not name.isprintable() or name != name.strip():
        return "has control characters, or spaces at its ends"
    return "is too long" if len(name.encode()) > _BYTES_MAX else ""
