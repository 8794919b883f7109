"""Limits of the options of `ArrowState`, checked on the client."""

from __future__ import annotations

from arrow_schemas.bucket_map import BUCKETS_MAX
from spark_state_ext.errors import UsageError
from spark_state_ext.files.erasure import WINDOWS

__all__ = ["check_flags", "check_sizes", "check_times", "erase_window_ms"]

MEMORY_BYTES_MIN = 1 << 20
# Arrow cannot copy more than 2 GiB of a column at once.
MEMORY_BYTES_MAX = 1 << 30
# With less time, snapshots would cost more than the state itself.
ERASE_WITHIN_S_MIN = 3_600


def check_flags(**values: bool) -> None:
    """Refuse arguments that are not booleans, such as text, which would always be true."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be True or False, not {value!r}")


def check_sizes(buckets: int, memory_bytes_max: int, inline_bytes_max: int, task_inline_bytes_max: int) -> None:
    """Refuse sizes that are out of range or not integers; arguments as for `ArrowState`."""
    _check_whole(
        buckets=buckets,
        memory_bytes_max=memory_bytes_max,
        inline_bytes_max=inline_bytes_max,
        task_inline_bytes_max=task_inline_bytes_max,
    )
    if not 1 <= buckets <= BUCKETS_MAX:
        raise UsageError(f"buckets must be a whole number from 1 to {BUCKETS_MAX}, not {buckets!r}")
    if not MEMORY_BYTES_MIN <= memory_bytes_max <= MEMORY_BYTES_MAX:
        raise UsageError(
            f"memory_bytes_max must be from {MEMORY_BYTES_MIN} to {MEMORY_BYTES_MAX}, not {memory_bytes_max}"
        )
    if inline_bytes_max < 0 or task_inline_bytes_max < 0:
        raise UsageError("inline_bytes_max and task_inline_bytes_max must not be negative")


def check_times(lease_ms: int, local_keep_s: float, commit_delay_ms_max: int, commit_timeout_ms: int) -> None:
    """Refuse times that are out of range or not numbers; arguments as for `ArrowState`."""
    _check_whole(lease_ms=lease_ms, commit_delay_ms_max=commit_delay_ms_max, commit_timeout_ms=commit_timeout_ms)
    if lease_ms < 100:
        raise UsageError(f"lease_ms must be at least 100, not {lease_ms}")
    if not isinstance(local_keep_s, (int, float)) or not local_keep_s >= 0:
        raise UsageError(f"local_keep_s must be a number of seconds, 0 or more, not {local_keep_s!r}")
    if not 0 <= commit_delay_ms_max <= commit_timeout_ms or commit_timeout_ms < 1:
        raise UsageError(
            "commit_timeout_ms must be at least 1 and commit_delay_ms_max from 0 to commit_timeout_ms, not "
            f"{commit_timeout_ms} and {commit_delay_ms_max}"
        )


def erase_window_ms(erase_within_s: int | None, pointer_write: str, current_format: str, clean_up: bool) -> int | None:
    """Return how far back a query with `erase_within_s` may go, in milliseconds; None without it."""
    if erase_within_s is None:
        return None
    _check_whole(erase_within_s=erase_within_s)
    if erase_within_s < ERASE_WITHIN_S_MIN:
        raise UsageError(f"erase_within_s must be at least {ERASE_WITHIN_S_MIN} (an hour), not {erase_within_s}")
    if not clean_up:
        raise UsageError("erase_within_s needs clean_up=True: without clean-up no bytes are erased")
    if pointer_write != current_format:
        raise UsageError(
            f"erase_within_s needs pointer_write={current_format!r}: older pointer formats cannot store times"
        )
    return 1000 * erase_within_s // WINDOWS


def _check_whole(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name} must be a whole number, not {value!r}")
