"""What numbers `ArrowState` accepts; what is refused is refused on the client."""

from __future__ import annotations

from arrow_schemas.bucket_map import BUCKETS_MAX
from spark_state_ext.errors import UsageError
from spark_state_ext.files.erasure import WINDOWS

__all__ = ["check_flags", "check_sizes", "check_times", "erase_window_ms"]

MEMORY_BYTES_MIN = 1 << 20
# Arrow cannot copy more than 2 GiB of a column at once.
MEMORY_BYTES_MAX = 1 << 30
# Below that, a file's snapshots would cost more than the state.
ERASE_WITHIN_S_MIN = 3_600


def check_flags(**values: bool) -> None:
    """Refuse what is neither True nor False, such as text, which would all be true; arguments by their names."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be True or False, not {value!r}")


def check_sizes(buckets: int, memory_bytes_max: int, inline_bytes_max: int, task_inline_bytes_max: int) -> None:
    """Refuse what is no size, or none that works; arguments as for `ArrowState`."""
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
    """Refuse what is no time, or none that works; arguments as for `ArrowState`."""
    _check_whole(lease_ms=lease_ms, commit_delay_ms_max=commit_delay_ms_max, commit_timeout_ms=commit_timeout_ms)
    if lease_ms < 100:
        raise UsageError(f"lease_ms must be at least 100, not {lease_ms}")
    if not isinstance(local_keep_s, (int, float)) or not local_keep_s >= 0:
        raise UsageError(f"local_keep_s must be a number of seconds, not negative: {local_keep_s!r}")
    if not 0 <= commit_delay_ms_max <= commit_timeout_ms or commit_timeout_ms < 1:
        raise UsageError(
            "commit_delay_ms_max must be from 0 to commit_timeout_ms, and that at least 1, not "
            f"{commit_delay_ms_max} and {commit_timeout_ms}"
        )


def erase_window_ms(erase_within_s: int | None, pointer_write: str, present: str, clean_up: bool) -> int | None:
    """How far back a query may go whose removed keys' bytes have to be gone within a time, milliseconds."""
    if erase_within_s is None:
        return None
    _check_whole(erase_within_s=erase_within_s)
    if erase_within_s < ERASE_WITHIN_S_MIN:
        raise UsageError(f"erase_within_s must be at least {ERASE_WITHIN_S_MIN} (an hour), not {erase_within_s}")
    if not clean_up:
        raise UsageError("erase_within_s needs clean_up=True: nothing is erased where nothing is deleted")
    if pointer_write != present:
        raise UsageError(f"erase_within_s needs pointer_write={present!r}: older pointers have no place for times")
    return 1000 * erase_within_s // WINDOWS


def _check_whole(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name} must be a whole number, not {value!r}")
