"""``spark_state_ext.report``: one page about a job, from its metrics and its checkpoint files. It only reads them."""

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
from spark_state_ext.worker.metrics import FILES, SCHEMA, read
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
    """Write a report of a job: one HTML file that needs nothing else.

    Parameters
    ----------
    path
        The root that `ArrowState` has, or a folder of metrics.
    out
        The file. One that is there is replaced.
    metrics
        A folder of metrics, where `path` is a root. Folders below it are read too.
    storage_options
        For fsspec, where the root is a URL.
    title
        Of the page; by default it names the path.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    UsageError
        When there is nothing to report of.
    EnvironmentSetupError
        When matplotlib is not installed: ``pip install "spark_state_ext[report]"``.
    StorageError
        When the root cannot be read, or the file not be written.

    Examples
    --------
    >>> report("/tmp/arrow-state", "report.html", metrics="/tmp/arrow-state-local")  # doctest: +SKIP
    PosixPath('report.html')
    """
    given = os.fspath(path)
    target = Path(out)
    noted = _metrics_folders(given, metrics)
    calls = read(noted) if noted is not None else SCHEMA.empty_table()
    files = []
    # A folder of metrics is no root, and may lie anywhere.
    if noted is None or metrics is not None:
        refuse_relative(given, "path")
        files = list_query_files(Folder(given, dict(storage_options or {})))
    operators = summarize_batches(calls)
    if not operators and not files:
        raise UsageError(
            f"there is nothing to report of in {given}: no {FILES} files of metrics, and no state of an operator. Give "
            "the root as ArrowState has it, or the folder …/metrics below its local_dir."
        )
    loads = map(build_load_section, measure_loads(calls))
    # Of one operator after the other: its batches, and then its buckets.
    noted_of = [section for pair in zip(map(build_batches_section, operators), loads, strict=True) for section in pair]
    sections = [build_summary(operators, files), *noted_of, *map(build_files_section, files)]
    sources = [] if noted is None else [f"metrics in {noted}"]
    sources += [] if noted is not None and metrics is None else [f"checkpoint files in {given}"]
    page = render_page(title or f"State of {given}", time.time(), sources, sections)
    _write(target, page)
    return target


def _metrics_folders(given: str, metrics: str | os.PathLike[str] | None) -> Path | None:
    """Where metrics are; None where there are none."""
    if metrics is not None:
        folder = Path(metrics)
        if not folder.is_dir() or next(folder.rglob(FILES), None) is None:
            raise UsageError(f"there are no metrics in {folder}: no {FILES} files there, nor in folders below it")
        return folder
    if "://" in given or not Path(given).is_dir():
        return None
    return Path(given) if next(Path(given).rglob(FILES), None) is not None else None


def _write(target: Path, page: str) -> None:
    """Whole or not at all."""
    made = target.with_name(f".tmp-{uuid.uuid4().hex}-{target.name}")
    try:
        try:
            made.write_text(page, encoding="utf-8")
            made.replace(target)
        finally:
            remove_file(made, missing_ok=True)
    except OSError as error:
        raise StorageError(f"the report cannot be written to {target}: {error}") from error
