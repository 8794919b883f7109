"""``savepoint status``: what is in a savepoint, who was started from it, and whether it may be deleted."""

from __future__ import annotations

from typing import Annotated, Any

import pyarrow as pa
import typer

from spark_state_ext.cli.output import Output, write_record
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.savepoint import Status, status_of
from spark_state_ext.cli.targets import given_folder

__all__ = ["RootsOption", "command"]

RootsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--root", help="root of an ArrowState whose queries may have been started from it; may be given several times"
    ),
]
_OPERATOR = pa.struct(
    [
        ("operator", pa.string()),
        ("buckets", pa.int64()),
        ("rows_max", pa.int64()),
        ("files", pa.int64()),
        ("bytes", pa.int64()),
    ]
)
_STARTED = pa.struct([("query_folder", pa.string()), ("mode", pa.string()), ("detached", pa.bool_())])
_RECORD = pa.schema(
    [
        ("id", pa.string()),
        ("form", pa.string()),
        ("made", pa.timestamp("ms", "UTC")),
        ("release", pa.string()),
        ("query", pa.string()),
        ("batch", pa.int64()),
        ("watermark", pa.timestamp("ms", "UTC")),
        ("deletable", pa.bool_()),
        ("because", pa.string()),
        ("operators", pa.list_(_OPERATOR)),
        ("started", pa.list_(_STARTED)),
    ]
)


def command(
    path: Annotated[str, typer.Argument(help="the savepoint's folder: an absolute path or a URL")],
    root: RootsOption = None,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what is in a savepoint, who was started from it, and whether it may be deleted."""
    options = options_of(storage_options)
    write_record(_record(status_of(given_folder(path, options), root or (), options)), _RECORD, output)


def _record(status: Status) -> dict[str, Any]:
    header, buckets = status.manifest.header, status.manifest.buckets
    operators = []
    for name, operator in sorted(header.operators.items()):
        mine = [it for it in buckets if it.operator == name]
        files = [file for it in mine for file in it.files]
        operators.append(
            {
                "operator": name,
                "buckets": operator.buckets,
                "rows_max": sum(it.pointer.rows for it in mine),
                "files": len(files),
                "bytes": sum(file.size_bytes for file in files),
            }
        )
    return {
        "id": header.id,
        "form": header.form,
        "made": header.made_ms,
        "release": header.package_version,
        "query": header.query_id or None,
        "batch": header.batch,
        "watermark": header.watermark_ms,
        "deletable": status.verdict.deletable,
        "because": status.verdict.because,
        "operators": operators,
        "started": [
            {"query_folder": it.query_folder, "mode": it.record.mode, "detached": it.detached} for it in status.started
        ],
    }
