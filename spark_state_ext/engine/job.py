"""What the client tells the executors about an operator: plain values, checked against the executor's package."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from arrow_schemas.operator import OperatorFile
from spark_state_ext.backends.registry import Backend
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.errors import VersionSkewError
from spark_state_ext.functions.ttl import Ttl
from spark_state_ext.version import __version__

__all__ = ["ARROW", "PANDAS", "ROWS", "Job"]

# Function of (key, frames, state), of (key, rows, state), and of a batch.
PANDAS, ROWS, ARROW = "pandas", "rows", "arrow"


@dataclass(frozen=True)
class Job:
    """One planned operator.

    Parameters
    ----------
    operator, root, storage_options, buckets, local_dir, strict, lease_ms, memory_bytes_max, local_keep_s, restore_from
        As given to `ArrowState`.
    pointer_read, clean_up, strict_output
        As given to `ArrowState`.
    backends, commit
        Its backends without the changelog, and how commits are made.
    key_schema, state_schema
        `StructType.json()` of the grouping and of the state columns.
    columns
        Names of the input's columns, as the user's frames show them.
    key_positions
        Where each key is among the packed columns; the packed columns are the input's, then keys that are not input
        columns.
    timeout_conf
        Spark's name of the timeout kind.
    event_time_position
        Packed column that has the watermark, or -1.
    timezone
        The session's time zone.
    frame_rows_max
        Most rows of one frame: ``spark.sql.execution.arrow.maxRecordsPerBatch``.
    late_by_previous_watermark
        Late rows are judged by the previous batch's watermark (Spark's default) and not by this batch's.
    application_id
        Spark's application, and the address of its driver: no two drivers have the same.
    local_mode
        Spark runs in local mode: its executor is the driver's own process.
    batches_retained
        ``spark.sql.streaming.minBatchesToRetain``.
    api
        How the function is called: `PANDAS`, `ROWS` or `ARROW`.
    input_schema, output_schema
        `StructType.json()` of the input's columns and of the output.
    ttl
        As given to `ArrowState`.
    function
        Of a built-in operator, as in `OperatorFile`.
    case_sensitive
        ``spark.sql.caseSensitive``.
    plan_id
        A fresh id of this plan: what a run is told by, as user code can change Spark's own (`lease_record`).
    package_version
        Version of this package on the client.
    """

    operator: str
    root: str
    buckets: int
    key_schema: str
    state_schema: str
    columns: tuple[str, ...]
    key_positions: tuple[int, ...]
    timeout_conf: str
    event_time_position: int
    timezone: str
    frame_rows_max: int
    late_by_previous_watermark: bool
    application_id: str
    local_mode: bool
    plan_id: str
    local_dir: str | None
    strict: bool
    lease_ms: int
    memory_bytes_max: int
    batches_retained: int
    local_keep_s: float
    backends: tuple[Backend, ...]
    commit: CommitOptions
    restore_from: str | None
    pointer_read: str
    clean_up: bool
    api: str
    input_schema: str
    output_schema: str
    ttl: Ttl | None = None
    function: str | None = None
    strict_output: bool = True
    case_sensitive: bool = False
    storage_options: dict[str, Any] = field(default_factory=dict)
    package_version: str = __version__

    def to_plain(self) -> dict[str, Any]:
        """As builtin values, which any version of this package can at least look at."""
        return asdict(self)

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Job:
        """Inverse of `to_plain`, on an executor.

        Raises
        ------
        VersionSkewError
            When client and executor have different versions of this package.
        """
        if plain["package_version"] != __version__:
            raise VersionSkewError(
                f"the query was planned with spark_state_ext {plain['package_version']} and the executors have "
                f"{__version__}: "
                "install the same version on both."
            )
        return Job(
            **{
                **plain,
                "columns": tuple(plain["columns"]),
                "key_positions": tuple(plain["key_positions"]),
                "backends": tuple(Backend(**backend) for backend in plain["backends"]),
                "commit": CommitOptions(**plain["commit"]),
                "ttl": None if plain["ttl"] is None else Ttl(**plain["ttl"]),
            }
        )

    def operator_file(self, query_folder: str) -> OperatorFile:
        """The operator file this job asks for, for state in the folder `query folder`."""
        asked = OperatorFile(
            self.operator, query_folder, self.buckets, self.key_schema, self.state_schema, function=self.function
        )
        return asked if self.ttl is None else asked.with_expiry()
