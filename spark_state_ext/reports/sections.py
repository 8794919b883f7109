"""Build the sections of a report: a summary, batches from metrics, and files from a root."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_state_ext.reports.batches import OperatorBatches, thin_batches
from spark_state_ext.reports.charts import BARS, Chart, Series, format_with_unit
from spark_state_ext.reports.checkpoints import BucketFiles, QueryFiles
from spark_state_ext.reports.page import PageTable, Section, format_time

__all__ = ["build_batches_section", "build_files_section", "build_summary"]

# More points would not be visible in a chart, and only make the page larger.
_POINTS_MAX = 400
# If there are more buckets than this, only the worst are listed.
_BUCKETS_LISTED_MAX = 20
_BARS_MAX = 256
_NAMED_MAX = 5


_BATCHES_HEAD = (
    *("operator", "query", "batches", "calls", "from", "to", "rows"),
    *("state", "keys at most", "failures"),
)
_FILES_HEAD = (
    *("operator", "query folder", "buckets", "snapshots", "deltas", "size"),
    *("newest", "most deltas to load"),
)


def build_summary(operators: Sequence[OperatorBatches], files: Sequence[QueryFiles]) -> Section:
    """Build the summary: a row for each operator with metrics, and for each query folder with files."""
    tables = []
    if operators:
        rows = [_build_batches_row(item) for item in operators]
        tables.append(PageTable("Batches, from metrics", _BATCHES_HEAD, rows))
    if files:
        tables.append(
            PageTable("Checkpoint files, from the root", _FILES_HEAD, [_build_files_row(item) for item in files])
        )
    notes = []
    if not operators:
        notes.append("There are no metrics, so this report does not cover batches.")
    if not files:
        notes.append("No root was given, or it has no state, so this report does not cover checkpoint files.")
    return Section("Summary", tables=tuple(tables), notes=tuple(notes))


def _build_batches_row(operator_batches: OperatorBatches) -> tuple[str, ...]:
    batches = operator_batches.batches
    failures = sum(int(pc.sum(batches[name]).as_py()) for name in ("upload_failures", "snapshot_failures"))
    return (
        operator_batches.operator,
        operator_batches.query_id,
        f"{batches.num_rows:,}",
        f"{operator_batches.calls:,}",
        format_time(pc.min(batches["ended_ms"]).as_py() / 1000),
        format_time(pc.max(batches["ended_ms"]).as_py() / 1000),
        f"{pc.sum(batches['rows']).as_py():,}",
        format_with_unit(float(batches["state_bytes"][-1].as_py()), "bytes"),
        f"{batches['state_rows'][-1].as_py():,}",
        f"{failures:,}",
    )


def _build_files_row(query_files: QueryFiles) -> tuple[str, ...]:
    chains = [bucket.chain for bucket in query_files.buckets if bucket.chain is not None]
    return (
        query_files.operator,
        query_files.query_folder,
        f"{len(query_files.buckets):,}",
        f"{sum(bucket.snapshots for bucket in query_files.buckets):,}",
        f"{sum(bucket.deltas for bucket in query_files.buckets):,}",
        format_with_unit(float(query_files.size_bytes), "bytes"),
        format_time(
            max((bucket.newest_s for bucket in query_files.buckets if bucket.newest_s is not None), default=None)
        ),
        f"{max(chains):,}" if chains else "unknown",
    )


# -- batches ---------------------------------------------------------------------------------------


def build_batches_section(operator_batches: OperatorBatches) -> Section:
    """Build the section about an operator's batches."""
    points, batches_per_point = thin_batches(operator_batches.batches, _POINTS_MAX)
    max_hint = f" Each point is the highest of {batches_per_point} batches." if batches_per_point > 1 else ""
    sum_hint = f" Each point is the sum of {batches_per_point} batches." if batches_per_point > 1 else ""
    return Section(
        f"Operator {operator_batches.operator}: batches",
        f"Query {operator_batches.query_id}, from the metrics of {operator_batches.calls:,} calls.",
        charts=(*_build_state_charts(points, max_hint, sum_hint), *_build_time_charts(points, max_hint, sum_hint)),
        notes=_describe_problems(operator_batches.batches),
    )


def _build_state_charts(points: pa.Table, max_hint: str, sum_hint: str) -> tuple[Chart, ...]:
    return (
        _make_line_chart(
            "State size",
            f"Size of all buckets' local stores after the batch.{max_hint}",
            "bytes",
            points,
            size="state_bytes",
        ),
        _make_line_chart(
            "Keys",
            "Keys that have state or a timeout: at least and at most so many. Both are equal if one run has all of the "
            f"state.{max_hint}",
            "keys",
            points,
            **{"at most": "state_rows", "at least": "state_rows_min"},
        ),
        _make_line_chart(
            "Rows",
            f"Input rows of the batch, without late ones, and rows of state that it changed.{sum_hint}",
            "rows",
            points,
            **{"input rows": "rows", "changed rows": "changed_rows"},
        ),
    )


def _build_time_charts(points: pa.Table, max_hint: str, sum_hint: str) -> tuple[Chart, ...]:
    return (
        _make_line_chart(
            "Commit time",
            "Time of a call from settling earlier uploads to the new pointer, including the wait for uploads."
            f"{max_hint}",
            "ms",
            points,
            **{"longest call": "commit_ms_max", "median call": "commit_ms_median"},
        ),
        _make_line_chart(
            "Wait for uploads",
            f"The part of the commit time in which calls waited for uploads.{max_hint}",
            "ms",
            points,
            **{"longest call": "wait_ms_max", "median call": "wait_ms_median"},
        ),
        _make_line_chart(
            "Restore time",
            "The longest time of a call to fetch state that was missing in its local store. It is near zero if all "
            f"state was there.{max_hint}",
            "ms",
            points,
            **{"longest call": "read_ms_max"},
        ),
        _make_bar_chart(
            "Files restored and deleted",
            f"Checkpoint files that calls fetched, and that clean-ups deleted in the same time.{sum_hint}",
            points,
            restored="restored_files",
            deleted="deleted_files",
        ),
        _make_line_chart(
            "Backends behind, and the lease",
            "Age of the oldest delta that a backend has not confirmed; and at the end of a call, the time since its "
            f"process last confirmed that the run holds the lease.{max_hint}",
            "ms",
            points,
            **{"oldest delta": "oldest_inline_ms_max", "lease": "lease_age_ms_max"},
        ),
    )


def _describe_problems(batches: pa.Table) -> tuple[str, ...]:
    """Describe what went wrong in the batches."""
    warnings = []
    for column, text in (
        ("upload_failures", "Uploads of deltas that failed"),
        ("snapshot_failures", "Snapshots that were not written, or that a backend refused"),
        ("restore_gaps", "Files that one backend gave because another did not"),
    ):
        affected = batches.filter(pc.greater(batches[column], 0))
        if affected.num_rows:
            numbers = ", ".join(str(batch) for batch in affected["batch"][:_NAMED_MAX].to_pylist())
            ellipsis = ", …" if affected.num_rows > _NAMED_MAX else ""
            warnings.append(f"{text}: {pc.sum(affected[column]).as_py():,}, in batch {numbers}{ellipsis}.")
    expected = batches.num_rows and pc.max(batches["batch"]).as_py() - pc.min(batches["batch"]).as_py() + 1
    if expected > batches.num_rows:
        warnings.append(
            f"The metrics of {expected - batches.num_rows:,} batches between the first and the last are missing: these "
            "batches had no calls, or their files are gone."
        )
    return tuple(warnings)


def _make_line_chart(title: str, caption: str, unit: str, batches: pa.Table, **columns: str) -> Chart:
    return Chart(title, caption, "Batch", unit, _list_positions(batches), _make_series(batches, columns))


def _make_bar_chart(title: str, caption: str, batches: pa.Table, **columns: str) -> Chart:
    return Chart(title, caption, "Batch", "files", _list_positions(batches), _make_series(batches, columns), BARS)


def _list_positions(batches: pa.Table) -> list[int]:
    numbers: list[int] = batches["batch"].to_pylist()
    return numbers


def _make_series(batches: pa.Table, columns: dict[str, str]) -> tuple[Series, ...]:
    return tuple(
        Series(name, batches[column].cast(pa.float64()).to_numpy().tolist()) for name, column in columns.items()
    )


# -- files -----------------------------------------------------------------------------------------


def build_files_section(query_files: QueryFiles) -> Section:
    """Build the section about a query's checkpoint files."""
    buckets = query_files.buckets
    by_urgency = sorted(buckets, key=lambda bucket: (bucket.problem == "", -(bucket.chain or 0), bucket.bucket))
    notes = [f"Bucket {bucket.bucket}: {bucket.problem}" for bucket in by_urgency[:_NAMED_MAX] if bucket.problem]
    restriction = ""
    if len(buckets) > _BUCKETS_LISTED_MAX:
        restriction = f", the {_BUCKETS_LISTED_MAX} with the longest lineages of {len(buckets):,}"
    table = PageTable(
        f"Buckets{restriction}",
        ("bucket", "version", "snapshots", "their size", "deltas", "their size", "deltas to load", "newest file"),
        [_build_bucket_row(bucket) for bucket in (by_urgency[:_BUCKETS_LISTED_MAX] if restriction else buckets)],
    )
    others = (
        f" It also has {query_files.other_files:,} other files "
        f"({format_with_unit(float(query_files.other_bytes), 'bytes')})."
    )
    return Section(
        f"Operator {query_files.operator}: checkpoint files",
        f"Query folder {query_files.query_folder}.{others}",
        tables=(table,),
        charts=_build_file_charts(buckets),
        notes=tuple(notes),
    )


def _build_bucket_row(files: BucketFiles) -> tuple[str, ...]:
    return (
        f"{files.bucket:,}",
        f"{files.version:,}",
        f"{files.snapshots:,}",
        format_with_unit(float(files.snapshot_bytes), "bytes"),
        f"{files.deltas:,}",
        format_with_unit(float(files.delta_bytes), "bytes"),
        "unknown" if files.chain is None else f"{files.chain:,}",
        format_time(files.newest_s),
    )


def _build_file_charts(buckets: Sequence[BucketFiles]) -> tuple[Chart, ...]:
    if not buckets:
        return ()
    buckets_per_bar = -(-len(buckets) // _BARS_MAX)
    hint = f" Each bar is the highest of {buckets_per_bar} buckets." if buckets_per_bar > 1 else ""
    numbers = [bucket.bucket for bucket in buckets][::buckets_per_bar]

    def highest(values: list[float]) -> list[float]:
        groups = [np.asarray(values[at : at + buckets_per_bar]) for at in range(0, len(values), buckets_per_bar)]
        return [float(np.nanmax(group)) if not np.isnan(group).all() else float("nan") for group in groups]

    chains = highest([float("nan") if bucket.chain is None else float(bucket.chain) for bucket in buckets])
    snapshots = highest([float(bucket.snapshot_bytes) for bucket in buckets])
    deltas = highest([float(bucket.delta_bytes) for bucket in buckets])
    return (
        Chart(
            "Deltas on top of the snapshot",
            "How many deltas a load of the bucket's newest checkpoint applies to its newest snapshot. A restore "
            f"fetches all of them.{hint}",
            "Bucket",
            "deltas",
            numbers,
            (Series("deltas", chains),),
            BARS,
        ),
        Chart(
            "Size of files",
            f"Size of all checkpoint files, including those that only older batches need.{hint}",
            "Bucket",
            "bytes",
            numbers,
            (Series("snapshots", snapshots), Series("deltas", deltas)),
            BARS,
        ),
    )
