"""``verify``: read every byte of state, and say which file is damaged."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.key_places import key_checks
from spark_state_ext.cli.output import Output, progress, say, table_of, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.targets import given_folder, target_of
from spark_state_ext.cli.verifying import DAMAGED, GONE, MISSING, UNKNOWN, WHOLE, Check, Checked, checks_of
from spark_state_ext.engine.folders import scratch_folder
from spark_state_ext.errors import UsageError
from spark_state_ext.worker.threads import side_by_side

__all__ = ["command"]

_PARALLEL_MAX = 8
_ROWS = pa.schema(
    [
        ("status", pa.string()),
        ("kind", pa.string()),
        ("bytes", pa.int64()),
        ("path", pa.string()),
        ("problem", pa.string()),
    ]
)


def command(
    path: Annotated[str, typer.Argument(help="a root, a query folder or a savepoint: an absolute path or a URL")],
    every: Annotated[bool, typer.Option("--all", help="list files that are whole, too")] = False,
    local_dir: Annotated[str | None, typer.Option(help="local folder for large files of object stores")] = None,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Read every byte of each file against its digests, and say which is damaged, and whether a key is in two buckets.

    Of a savepoint, each file must be the one that the manifest names. Which files a running query needs only Spark
    knows: files that are gone from a query folder are not missed. Where buckets are the partitions of the source, each
    key of the newest state must be in one bucket (kind keys).
    """
    options = options_of(storage_options)
    target = target_of(given_folder(path, options))
    checks = checks_of(target, scratch_folder(local_dir))
    if all(check.read is None for check in checks):
        raise UsageError(
            f"{target.folder.root} has no state: none of the {len(checks)} files below it is one of this package. Give "
            "a root as ArrowState has it, a query folder below it, or a savepoint"
        )
    checks += key_checks(target, local_dir, options)
    found = _carried_out(checks)
    shown = [it for it in found if every or it.status not in (WHOLE, GONE)]
    rows = [{**asdict(it), "bytes": it.size_bytes, "problem": it.problem or None} for it in shown]
    if rows or output is not Output.TABLE:
        write_table(table_of(rows, _ROWS), output)
    counts = {status: sum(it.status == status for it in found) for status in (DAMAGED, MISSING, UNKNOWN)}
    say(
        f"files={len(found)} bytes={sum(it.size_bytes for it in found)} "
        + " ".join(f"{status}={count}" for status, count in counts.items())
    )
    raise typer.Exit(NO if counts[DAMAGED] or counts[MISSING] else DONE)


def _carried_out(checks: list[Check]) -> list[Checked]:
    with progress("reading", sum(it.size_bytes for it in checks)) as advance:

        def work(check: Check) -> Checked:
            done = check.carried_out()
            advance(check.size_bytes)
            return done

        return side_by_side("verify", _PARALLEL_MAX, work, checks) if checks else []
