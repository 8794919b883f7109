"""What the client tells the executors about an operator: plain values, checked against the executor's package."""

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

# Function of (key, frames, state), of (key, rows, state), and of a batch.
PANDAS, ROWS, ARROW = "pandas", "rows", "arrow"
# Version and build of this package when this process imported it: files may change under a driver that runs.
BUILD = version_and_build()


def refuse_other_release(plain: Mapping[str, Any]) -> None:
    """Refuse what a client with another version or build of this package has sent, on an executor.

    Builds are compared for releases too. Only if one side was installed without its sources, the version alone decides.
    """
    if plain["package_version"] == BUILD:
        return
    client, client_build = _version_and_build(plain["package_version"])
    executor, executor_build = _version_and_build(BUILD)
    if client == executor and not (client_build and executor_build):
        return
    what = f"the query was planned with spark_state_ext {_named(client, client_build)}, and this executor has "
    what += f"{_named(executor, executor_build)} in {Path(__file__).parents[1]}"
    if client != executor:
        raise VersionSkewError(f"{what}. Install the same version on the client and on all executors.")
    raise VersionSkewError(
        f"{what}: the same version, made from other sources. Install the same wheel (or ship the same files) on the "
        "client and on all executors, then restart the driver. `python -m spark_state_ext --version` prints the build."
    )


def _version_and_build(text: str) -> tuple[str, str]:
    version, _, build = text.partition("+")
    return version, build


def _named(version: str, build: str) -> str:
    return f"{version} (build {build or 'unknown'})"


@dataclass(frozen=True)
class Job:
    """One planned operator.

    Parameters
    ----------
    options
        Those of `ArrowState`.
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
    function
        Of a built-in operator, as in `OperatorFile`.
    case_sensitive
        ``spark.sql.caseSensitive``.
    captured
        File with the pointers of the retained checkpoint that the query may start from; None: there is none.
    not_captured
        Why not, where one is asked for.
    rescaled_from
        File with the pointers of the query's own last batch, where these may be of another bucket map; None: there is
        none.
    rescaled_buckets
        How many there are.
    not_rescaled
        Why there is none, where one is asked for.
    plan_id
        A fresh id of this plan: what a run is told by, as user code can change Spark's own (`lease_record`).
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
        """Name of the operator."""
        return self.options.operator

    def to_plain(self) -> dict[str, Any]:
        """As builtin values, which any version of this package can at least look at."""
        return {**asdict(self), "options": self.options.to_plain()}

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Job:
        """Inverse of `to_plain`, on an executor."""
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
        """The operator file this job asks for, for state in the folder `query_folder`."""
        bucket_map = self.options.bucket_map
        asked = OperatorFile(
            self.options.operator,
            query_folder,
            bucket_map.buckets,
            self.key_schema,
            self.state_schema,
            function=self.function,
            mapped=None if bucket_map.kind == HASH else bucket_map,
        )
        return asked if self.options.ttl is None else asked.with_expiry()
