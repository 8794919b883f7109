"""The id of the machine's current boot."""

from __future__ import annotations

import functools
from pathlib import Path

from spark_state_ext.worker import descriptors

__all__ = ["UNKNOWN_BOOT", "boot_id"]

UNKNOWN_BOOT = "unknown-boot"

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return an id of the machine's current boot, or a constant if the system has none."""
    try:
        return _boot_id()
    except OSError as error:
        # Returning the constant here would make stores of this boot look like those of an earlier one, to be removed.
        if descriptors.is_limit_reached(error):
            raise descriptors.make_too_many_error(f"{_BOOT_ID_FILE} cannot be read") from error
        return UNKNOWN_BOOT


@functools.lru_cache(maxsize=1)
def _boot_id() -> str:
    return _BOOT_ID_FILE.read_text().strip().replace("-", "")[:16]
