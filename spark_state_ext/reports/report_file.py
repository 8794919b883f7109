"""``spark_state_ext.report``: write one page about a job, from its metrics and its checkpoint files."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark_state_ext.errors import StorageError, UsageError
from spark_state_ext.files.folder import Folder, refuse_relative
from spark_state_ext.reports.batches import summarize_batches
from spark_state_ext.reports.checkpoints import list_query_files
from spark_state_ext.reports.load_section import build_load_section
from spark_state_ext.reports.page import render_page
from spark_state_ext.reports.sections import build_batches_section, build_files_section, build_summary
from spark_state_ext.reports.skew import measure_loads
from spark_state_ext.worker.metrics import FILE_PATTERN, SCHEMA, read
from spark_state_ext.worker.removal import remove_file

__all__ = ["report"]


def report(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] = "report.html",
    *,
    metrics: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    title: str = "",
) -> Path:
    """Write a report about a job: one self-contained HTML file.

    Parameters
    ----------
    path
        The root that `ArrowState` has, or a folder of metrics.
    out
        The file to write. An existing file is replaced.
    metrics
        A folder of metrics, if `path` is a root. Folders below it are read too.
    storage_options
        Options for fsspec, if the root is a URL.
    title
        The title of the page; by default it names the path.

    Returns
    -------
    Path
        The written file.

    Raises
    ------
    UsageError
        When there are neither metrics nor state.
    EnvironmentSetupError
        When matplotlib is not installed: ``pip install "spark_state_ext[report]"``.
    StorageError
        When the root cannot be read or the file cannot be written.

    Examples
    --------
    >>> report("/tmp/arrow-state", "report.html", metrics="/tmp/arrow-state-local")  # doctest: +SKIP
    PosixPath('report.html')
    """
    source = os.fspath(path)
    target = Path(out)
    metrics_folder = _find_metrics(source, metrics)
    calls = read(metrics_folder) if metrics_folder is not None else SCHEMA.empty_table()
    files = []
    # Without `metrics`, a path with metrics files is a folder of metrics and not a root.
    if metrics_folder is None or metrics is not None:
        refuse_relative(source, "path")
        files = list_query_files(Folder(source, dict(storage_options or {})))
    operators = summarize_batches(calls)
    if not operators and not files:
        raise UsageError(
            f"there is nothing to report in {source}: it has neither {FILE_PATTERN} files of metrics nor state of an "
            "operator. Give the root that ArrowState has, or the folder …/metrics below its local_dir."
        )
    loads = map(build_load_section, measure_loads(calls))
    # For each operator: its batches, then its buckets.
    operator_sections = [
        section for pair in zip(map(build_batches_section, operators), loads, strict=True) for section in pair
    ]
    sections = [build_summary(operators, files), *operator_sections, *map(build_files_section, files)]
    sources = [] if metrics_folder is None else [f"metrics in {metrics_folder}"]
    sources += [] if metrics_folder is not None and metrics is None else [f"checkpoint files in {source}"]
    page = render_page(title or f"State of {source}", time.time(), sources, sections)
    _write_page(target, page)
    return target


def _find_metrics(source: str, metrics: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder with metrics files; None if there is none."""
    if metrics is not None:
        folder = Path(metrics)
        if not folder.is_dir() or next(folder.rglob(FILE_PATTERN), None) is None:
            raise UsageError(f"there are no metrics in {folder}: no {FILE_PATTERN} files there or in folders below it")
        return folder
    if "://" in source or not Path(source).is_dir():
        return None
    return Path(source) if next(Path(source).rglob(FILE_PATTERN), None) is not None else None


def _write_page(target: Path, page: str) -> None:
    """Write the page atomically: completely or not at all."""
    temporary = target.with_name(f".tmp-{uuid.uuid4().hex}-{target.name}")
    try:
        try:
            temporary.write_text(page, encoding="utf-8")
            temporary.replace(target)
        finally:
            remove_file(temporary, missing_ok=True)
    except OSError as error:
        raise StorageError(f"the report cannot be written to {target}: {error}") from error
