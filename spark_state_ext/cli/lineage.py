"""Lineage: how the checkpoints of a bucket were built upon each other, as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef
from spark_state_ext.cli.bucket_files import CheckpointEntry, QueryChoice, list_checkpoint_files, report_damage
from spark_state_ext.cli.options import OutputOption, QueryPath
from spark_state_ext.cli.output import Output, parse_columns, say, write_records
from spark_state_ext.errors import EnvironmentSetupError, StorageError, UsageError
from spark_state_ext.files.printable import printable

__all__ = ["lineage"]

_PICTURES = (".svg", ".png")
_ROWS = parse_columns(
    "bucket int, version int, id, parent_version int, parent_id, kinds texts, batch int, heartbeat int, bytes int"
)


def lineage(
    path: QueryPath,
    bucket: Annotated[int, typer.Option(metavar="N", help="of which bucket")],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="draw a picture: a file that ends in .svg or .png")
    ] = None,
    *,
    choice: QueryChoice,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the checkpoints of a bucket as a tree, the newest last. Attempts that Spark made again are branches.

    Pictures need matplotlib: pip install 'spark_state_ext[report]'.
    """
    if to is not None and to.suffix not in _PICTURES:
        raise UsageError(f"--to must end in {' or '.join(_PICTURES)}, not {to.name!r}")
    folder, in_force = choice.find(path)
    files = list_checkpoint_files(folder, in_force, [bucket])
    nodes = _nodes_of(files)
    if to is not None:
        _draw(nodes, f"bucket {bucket} of {folder.root}", to)
        say(f"drawn: {len(nodes)} checkpoints in {to}")
    elif output is Output.TABLE:
        for line in _text_lines(nodes):
            typer.echo(line)
    else:
        write_records([_row(bucket, it) for it in nodes], _ROWS, output)
    raise typer.Exit(report_damage(files))


def _row(bucket: int, node: Node) -> dict[str, Any]:
    return {
        "bucket": bucket,
        "version": node.ref.version,
        "id": node.ref.id,
        "parent_version": None if node.parent is None else node.parent.version,
        "parent_id": None if node.parent is None else node.parent.id,
        "kinds": list(node.kinds),
        "batch": node.batch,
        "heartbeat": node.heartbeat,
        "bytes": node.size_bytes,
    }


_ID_DIGITS = 8
_INCHES_EACH = 0.35


@dataclass(frozen=True)
class Node:
    """A checkpoint."""

    ref: CheckpointRef
    # What it was built on; None: nothing, or that is not known.
    parent: CheckpointRef | None
    kinds: tuple[str, ...]
    batch: int
    heartbeat: int
    size_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.ref.version}_{self.ref.id[:_ID_DIGITS]} {'+'.join(self.kinds)} batch={self.batch} "
            f"heartbeat={self.heartbeat} bytes={self.size_bytes}"
        )


def _nodes_of(files: Sequence[CheckpointEntry]) -> list[Node]:
    """The checkpoints of a bucket whose files can be read, in order of version."""
    by_ref: dict[CheckpointRef, list[CheckpointEntry]] = {}
    for file in files:
        if file.header is not None:
            by_ref.setdefault(file.ref, []).append(file)
    nodes = []
    for ref, mine in sorted(by_ref.items()):
        header = mine[0].header
        assert header is not None, "only files with a header are taken"
        nodes.append(
            Node(
                ref,
                header.parent,
                tuple(it.kind for it in mine),
                header.writer.batch,
                header.writer.heartbeat,
                sum(it.entry.size_bytes for it in mine),
            )
        )
    return nodes


def _children(nodes: Sequence[Node]) -> tuple[list[Node], dict[CheckpointRef, list[Node]]]:
    """Those whose parent has no file here, and the children of each."""
    there = {node.ref for node in nodes}
    roots, children = [], dict[CheckpointRef, list[Node]]()
    for node in nodes:
        if node.parent is None or node.parent not in there:
            roots.append(node)
        else:
            children.setdefault(node.parent, []).append(node)
    return roots, children


def _text_lines(nodes: Sequence[Node]) -> Iterator[str]:
    """A line for each checkpoint: those that only children follow stand below each other, branches are indented."""
    roots, children = _children(nodes)
    # Depth first, without recursion: a lineage may be long. The one with the longest line goes last, not indented.
    left = [(node, "", "") for node in reversed(roots)]
    while left:
        node, before, below = left.pop()
        gone = "" if node.parent is None or before or node not in roots else f" (built on {_short(node.parent)})"
        yield f"{before}{node}{gone}"
        mine = children.get(node.ref, [])
        if len(mine) == 1:
            left.append((mine[0], below, below))
            continue
        branches = [(it, f"{below}├─ ", f"{below}│  ") for it in mine[:-1]]
        branches += [(it, f"{below}└─ ", f"{below}   ") for it in mine[-1:]]
        left += reversed(branches)


def _short(ref: CheckpointRef) -> str:
    return f"{ref.version}_{ref.id[:_ID_DIGITS]}, which has no file here"


def _draw(nodes: Sequence[Node], title: str, path: Path) -> None:
    """Draw the checkpoints: versions from left to right, branches above each other, snapshots as squares."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentSetupError(
            "pictures need matplotlib, which this Python does not have: pip install 'spark_state_ext[report]'"
        ) from error
    lanes = _lanes(nodes)
    there = {node.ref: node for node in nodes}
    heights = max(lanes.values(), default=0) + 1
    versions = [node.ref.version for node in nodes] or [0]
    figure = Figure(figsize=(2 + _INCHES_EACH * (max(versions) - min(versions) + 1), 1.5 + 2 * _INCHES_EACH * heights))
    axes = figure.add_subplot()
    for node in nodes:
        if node.parent in there:
            ends = [there[node.parent], node]
            axes.plot([it.ref.version for it in ends], [lanes[it.ref] for it in ends], color="0.6", zorder=1)
        snapshot = SNAPSHOT in node.kinds
        axes.scatter(
            [node.ref.version], [lanes[node.ref]], marker="s" if snapshot else "o", color="C1" if snapshot else "C0"
        )
    # A name of a folder is no formula, whatever signs it has.
    axes.set_title(printable(title), fontsize="small", parse_math=False)
    axes.set_xlabel("version (squares have a snapshot)")
    axes.set_yticks([])
    axes.margins(x=0.05, y=0.4)
    # The same tree is the same file.
    options: Any = {"svg.hashsalt": "spark_state_ext"}
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    try:
        with matplotlib.rc_context(options):
            figure.savefig(path, metadata=metadata, bbox_inches="tight")
    except OSError as error:
        raise StorageError(f"the picture {path} cannot be written: {error}. Choose another place.") from error


def _lanes(nodes: Sequence[Node]) -> dict[CheckpointRef, int]:
    """A height for each checkpoint: the first child goes on at its parent's, each other one begins a new one."""
    roots, children = _children(nodes)
    lanes: dict[CheckpointRef, int] = {}
    used = 0
    todo: list[tuple[Node, int | None]] = [(node, None) for node in reversed(roots)]
    while todo:
        node, lane = todo.pop()
        if lane is None:
            lane, used = used, used + 1
        lanes[node.ref] = lane
        mine = children.get(node.ref, [])
        todo += [(it, None if at else lane) for at, it in reversed(list(enumerate(mine)))]
    return lanes
