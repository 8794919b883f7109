"""What a report tells, as sections of its page: of batches from metrics, of files from a root."""

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

# More points than a chart has room for make the page large and tell nothing.
_POINTS_MAX = 400
# More buckets than this are told of by the worst of them only.
_BUCKETS_TOLD_MAX = 20
_BARS_MAX = 256
_NAMED_MAX = 5


_SUMMED_HEAD = (
    *("operator", "query", "batches", "calls", "from", "to", "rows"),
    *("state", "keys at most", "failures"),
)
_COUNTED_HEAD = (
    *("operator", "query folder", "buckets", "snapshots", "deltas", "size"),
    *("newest", "most deltas to load"),
)


def build_summary(operators: Sequence[OperatorBatches], files: Sequence[QueryFiles]) -> Section:
    """What there is at all."""
    tables = []
    if operators:
        rows = [_summed(it) for it in operators]
        tables.append(PageTable("Batches, from metrics", _SUMMED_HEAD, rows))
    if files:
        tables.append(PageTable("Checkpoint files, from the root", _COUNTED_HEAD, [_counted(it) for it in files]))
    notes = []
    if not operators:
        notes.append("There are no metrics, so this report tells nothing of batches.")
    if not files:
        notes.append("No root was given, or it has no state, so this report tells nothing of checkpoint files.")
    return Section("Summary", tables=tuple(tables), notes=tuple(notes))


def _summed(it: OperatorBatches) -> tuple[str, ...]:
    batches = it.batches
    failures = sum(int(pc.sum(batches[name]).as_py()) for name in ("upload_failures", "snapshot_failures"))
    return (
        it.operator,
        it.query_id,
        f"{batches.num_rows:,}",
        f"{it.calls:,}",
        format_time(pc.min(batches["ended_ms"]).as_py() / 1000),
        format_time(pc.max(batches["ended_ms"]).as_py() / 1000),
        f"{pc.sum(batches['rows']).as_py():,}",
        format_with_unit(float(batches["state_bytes"][-1].as_py()), "bytes"),
        f"{batches['state_rows'][-1].as_py():,}",
        f"{failures:,}",
    )


def _counted(it: QueryFiles) -> tuple[str, ...]:
    chains = [bucket.chain for bucket in it.buckets if bucket.chain is not None]
    return (
        it.operator,
        it.query_folder,
        f"{len(it.buckets):,}",
        f"{sum(bucket.snapshots for bucket in it.buckets):,}",
        f"{sum(bucket.deltas for bucket in it.buckets):,}",
        format_with_unit(float(it.size_bytes), "bytes"),
        format_time(max((bucket.newest_s for bucket in it.buckets if bucket.newest_s is not None), default=None)),
        f"{max(chains):,}" if chains else "unknown",
    )


# -- batches ---------------------------------------------------------------------------------------


def build_batches_section(it: OperatorBatches) -> Section:
    """What metrics tell of an operator."""
    few, each = thin_batches(it.batches, _POINTS_MAX)
    say = f" Each point is the highest of {each} batches." if each > 1 else ""
    summed = f" Each point is the sum of {each} batches." if each > 1 else ""
    return Section(
        f"Operator {it.operator}: batches",
        f"Query {it.query_id}. From the rows that executors noted of {it.calls:,} calls.",
        charts=(*_charts_of_state(few, say, summed), *_charts_of_times(few, say, summed)),
        notes=_warnings(it.batches),
    )


def _charts_of_state(few: pa.Table, say: str, summed: str) -> tuple[Chart, ...]:
    return (
        _lines(
            "State size",
            f"What all buckets held in local stores after the batch.{say}",
            "bytes",
            few,
            size="state_bytes",
        ),
        _lines(
            "Keys",
            "Keys that have state or a timeout: between these two bounds, which meet where one run has all of the "
            f"state.{say}",
            "keys",
            few,
            **{"at most": "state_rows", "at least": "state_rows_min"},
        ),
        _lines(
            "Rows",
            f"Input rows of the batch, without late ones, and rows of state that it changed.{summed}",
            "rows",
            few,
            **{"input rows": "rows", "changed rows": "changed_rows"},
        ),
    )


def _charts_of_times(few: pa.Table, say: str, summed: str) -> tuple[Chart, ...]:
    return (
        _lines(
            "Commit time",
            "Of the batch's calls, from settling earlier uploads to the new pointer, waiting for uploads included."
            f"{say}",
            "ms",
            few,
            **{"longest call": "commit_ms_max", "median call": "commit_ms_median"},
        ),
        _lines(
            "Wait for uploads",
            f"The part of the commit in which the batch's calls waited for uploads.{say}",
            "ms",
            few,
            **{"longest call": "wait_ms_max", "median call": "wait_ms_median"},
        ),
        _lines(
            "Restore time",
            "The longest that a call of the batch took to fetch state that its local store lacked. It is next to "
            f"nothing where all was there.{say}",
            "ms",
            few,
            **{"longest call": "read_ms_max"},
        ),
        _stacks(
            "Files restored and deleted",
            f"Checkpoint files that the batch's calls fetched, and that clean-ups deleted meanwhile.{summed}",
            few,
            restored="restored_files",
            deleted="deleted_files",
        ),
        _lines(
            "Backends behind, and the lease",
            "Age of the oldest delta that a backend has not confirmed, and how long before a call ended its process "
            f"last knew that the run holds the lease.{say}",
            "ms",
            few,
            **{"oldest delta": "oldest_inline_ms_max", "lease": "lease_age_ms_max"},
        ),
    )


def _warnings(batches: pa.Table) -> tuple[str, ...]:
    """What went wrong in the batches, in words."""
    told = []
    for column, says in (
        ("upload_failures", "Uploads of deltas that failed"),
        ("snapshot_failures", "Snapshots that were not made, or that a backend refused"),
        ("restore_gaps", "Files that another backend gave than the one that should have"),
    ):
        found = batches.filter(pc.greater(batches[column], 0))
        if found.num_rows:
            numbers = ", ".join(str(batch) for batch in found["batch"][:_NAMED_MAX].to_pylist())
            more = ", …" if found.num_rows > _NAMED_MAX else ""
            told.append(f"{says}: {pc.sum(found[column]).as_py():,}, in batch {numbers}{more}.")
    missing = batches.num_rows and pc.max(batches["batch"]).as_py() - pc.min(batches["batch"]).as_py() + 1
    if missing > batches.num_rows:
        told.append(
            f"The metrics lack {missing - batches.num_rows:,} batches between the first and the last: these had no "
            "call, or their files are gone."
        )
    return tuple(told)


def _lines(title: str, says: str, unit: str, batches: pa.Table, **columns: str) -> Chart:
    return Chart(title, says, "Batch", unit, _positions(batches), _series(batches, columns))


def _stacks(title: str, says: str, batches: pa.Table, **columns: str) -> Chart:
    return Chart(title, says, "Batch", "files", _positions(batches), _series(batches, columns), BARS)


def _positions(batches: pa.Table) -> list[int]:
    found: list[int] = batches["batch"].to_pylist()
    return found


def _series(batches: pa.Table, columns: dict[str, str]) -> tuple[Series, ...]:
    return tuple(
        Series(name, batches[column].cast(pa.float64()).to_numpy().tolist()) for name, column in columns.items()
    )


# -- files -----------------------------------------------------------------------------------------


def build_files_section(it: QueryFiles) -> Section:
    """What a root has of a query."""
    shown = it.buckets
    worst = sorted(shown, key=lambda bucket: (bucket.problem == "", -(bucket.chain or 0), bucket.bucket))
    notes = [f"Bucket {bucket.bucket}: {bucket.problem}" for bucket in worst[:_NAMED_MAX] if bucket.problem]
    few = ""
    if len(shown) > _BUCKETS_TOLD_MAX:
        few = f", the {_BUCKETS_TOLD_MAX} with the longest lineages of {len(shown):,}"
    table = PageTable(
        f"Buckets{few}",
        ("bucket", "version", "snapshots", "their size", "deltas", "their size", "deltas to load", "newest file"),
        [_bucket(bucket) for bucket in (worst[:_BUCKETS_TOLD_MAX] if few else shown)],
    )
    also = f" Beside them lie {it.other_files:,} other files ({format_with_unit(float(it.other_bytes), 'bytes')})."
    return Section(
        f"Operator {it.operator}: checkpoint files",
        f"Query folder {it.query_folder}.{also}",
        tables=(table,),
        charts=_charts_of(shown),
        notes=tuple(notes),
    )


def _bucket(it: BucketFiles) -> tuple[str, ...]:
    return (
        f"{it.bucket:,}",
        f"{it.version:,}",
        f"{it.snapshots:,}",
        format_with_unit(float(it.snapshot_bytes), "bytes"),
        f"{it.deltas:,}",
        format_with_unit(float(it.delta_bytes), "bytes"),
        "unknown" if it.chain is None else f"{it.chain:,}",
        format_time(it.newest_s),
    )


def _charts_of(buckets: Sequence[BucketFiles]) -> tuple[Chart, ...]:
    if not buckets:
        return ()
    each = -(-len(buckets) // _BARS_MAX)
    say = f" Each bar is the highest of {each} buckets." if each > 1 else ""
    numbers = [bucket.bucket for bucket in buckets][::each]

    def highest(values: list[float]) -> list[float]:
        groups = [np.asarray(values[at : at + each]) for at in range(0, len(values), each)]
        return [float(np.nanmax(group)) if not np.isnan(group).all() else float("nan") for group in groups]

    chains = highest([float("nan") if it.chain is None else float(it.chain) for it in buckets])
    snapshots = highest([float(it.snapshot_bytes) for it in buckets])
    deltas = highest([float(it.delta_bytes) for it in buckets])
    return (
        Chart(
            "Deltas upon the snapshot",
            "How many deltas a load of the bucket's newest checkpoint lays upon its newest snapshot. A restore has to "
            f"fetch all of them.{say}",
            "Bucket",
            "deltas",
            numbers,
            (Series("deltas", chains),),
            BARS,
        ),
        Chart(
            "Size of files",
            f"Of all checkpoint files, those included that only older batches need.{say}",
            "Bucket",
            "bytes",
            numbers,
            (Series("snapshots", snapshots), Series("deltas", deltas)),
            BARS,
        ),
    )
