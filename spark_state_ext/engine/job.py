"""`Job`: the plan of an operator that the client sends to executors, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arrow_schemas.bucket_map import HASH
from arrow_schemas.operator import OperatorFile
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.errors import VersionSkewError
from spark_state_ext.version import version_and_build

__all__ = ["ARROW", "BUILD", "PANDAS", "ROWS", "Job", "refuse_other_release"]

# APIs of the user's function: its arguments are (key, frames, state), (key, rows, state), or a batch.
PANDAS, ROWS, ARROW = "pandas", "rows", "arrow"
# Version and build at the time of the import, because the files may change while a driver runs.
BUILD = version_and_build()


def refuse_other_release(plain: Mapping[str, Any]) -> None:
    """Raise on an executor if the client has another version or build of this package.

    Builds are compared for releases, too. If the build of one side is unknown, only the versions are compared.
    """
    if plain["package_version"] == BUILD:
        return
    client, client_build = _split_build(plain["package_version"])
    executor, executor_build = _split_build(BUILD)
    if client == executor and not (client_build and executor_build):
        return
    message = (
        f"the query was planned with spark_state_ext {_describe_release(client, client_build)}, and this executor has "
    )
    message += f"{_describe_release(executor, executor_build)} in {Path(__file__).parents[1]}"
    if client != executor:
        raise VersionSkewError(f"{message}. Install the same version on the client and on all executors.")
    raise VersionSkewError(
        f"{message}: the same version, built from other sources. Install the same wheel (or ship the same files) on "
        "the client and on all executors, then restart the driver. `python -m spark_state_ext --version` prints the "
        "build."
    )


def _split_build(text: str) -> tuple[str, str]:
    version, _, build = text.partition("+")
    return version, build


def _describe_release(version: str, build: str) -> str:
    return f"{version} (build {build or 'unknown'})"


@dataclass(frozen=True)
class Job:
    """One planned operator.

    Parameters
    ----------
    options
        The options of `ArrowState`.
    key_schema, state_schema
        `StructType.json()` of the grouping columns and of the state columns.
    columns
        Names of the input's columns, as the user's frames show them.
    key_positions
        Position of each key among the packed columns: the input's columns, then keys that are not input columns.
    timeout_conf
        Spark's name of the timeout kind.
    event_time_position
        Position of the packed column with the watermark, or -1.
    timezone
        The session's time zone.
    frame_rows_max
        Maximum rows of one frame: ``spark.sql.execution.arrow.maxRecordsPerBatch``.
    late_by_previous_watermark
        True: the previous batch's watermark decides which rows are late (Spark's default); False: this batch's.
    application_id
        Spark's application and the address of its driver; unique to a driver.
    local_mode
        Spark runs in local mode: its executor is the driver's own process.
    batches_retained
        ``spark.sql.streaming.minBatchesToRetain``.
    api
        How the function is called: `PANDAS`, `ROWS` or `ARROW`.
    input_schema, output_schema
        `StructType.json()` of the input's columns and of the output.
    function
        Name of a built-in operator, as in `OperatorFile`.
    case_sensitive
        ``spark.sql.caseSensitive``.
    captured
        File with the pointers of the retained checkpoint that the query may start from, or None.
    not_captured
        Why there is no such file although the query asks for one.
    rescaled_from
        File with the pointers of the query's own last batch, if these may have another bucket map, or None.
    rescaled_buckets
        Number of these pointers.
    not_rescaled
        Why there is no such file although the query asks for one.
    plan_id
        A fresh id of this plan. It identifies the run, because user code can change Spark's own id (`lease_record`).
    package_version
        Version and build of this package on the client.
    """

    options: StateOptions
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
    batches_retained: int
    api: str
    input_schema: str
    output_schema: str
    function: str | None = None
    case_sensitive: bool = False
    captured: str | None = None
    not_captured: str = ""
    rescaled_from: str | None = None
    rescaled_buckets: int = 0
    not_rescaled: str = ""
    package_version: str = BUILD

    @property
    def operator(self) -> str:
        """The operator's name."""
        return self.options.operator

    def to_plain(self) -> dict[str, Any]:
        """Return the job as builtin values, which any version of this package can read."""
        return {**asdict(self), "options": self.options.to_plain()}

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Job:
        """Return the job from its plain values, on an executor."""
        refuse_other_release(plain)
        return Job(
            **{
                **plain,
                "columns": tuple(plain["columns"]),
                "key_positions": tuple(plain["key_positions"]),
                "options": StateOptions.from_plain(plain["options"]),
            }
        )

    def operator_file(self, query_folder: str) -> OperatorFile:
        """Return the operator file that this job needs in a query folder."""
        bucket_map = self.options.bucket_map
        operator_file = OperatorFile(
            self.options.operator,
            query_folder,
            bucket_map.buckets,
            self.key_schema,
            self.state_schema,
            function=self.function,
            mapped=None if bucket_map.kind == HASH else bucket_map,
        )
        return operator_file if self.options.ttl is None else operator_file.with_expiry()
