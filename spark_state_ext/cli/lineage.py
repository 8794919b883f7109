"""The command lineage: prints or draws which checkpoint of a bucket builds on which."""

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
    bucket: Annotated[int, typer.Option(metavar="N", help="number of the bucket")],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="draw a picture: a file that ends in .svg or .png")
    ] = None,
    *,
    choice: QueryChoice,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the checkpoints of a bucket as a tree, the newest last. Repeated attempts at a batch are branches.

    Pictures need matplotlib: pip install 'spark_state_ext[report]'.
    """
    if to is not None and to.suffix not in _PICTURES:
        raise UsageError(f"--to must end in {' or '.join(_PICTURES)}, not {to.name!r}")
    folder, operator = choice.find(path)
    files = list_checkpoint_files(folder, operator, [bucket])
    nodes = _build_nodes(files)
    if to is not None:
        _draw(nodes, f"bucket {bucket} of {folder.root}", to)
        say(f"drawn: {len(nodes)} checkpoints in {to}")
    elif output is Output.TABLE:
        for line in _format_tree(nodes):
            typer.echo(line)
    else:
        write_records([_row(bucket, node) for node in nodes], _ROWS, output)
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
    """A checkpoint with the files it has."""

    ref: CheckpointRef
    # The checkpoint that it builds on; None if there is none, or it is unknown.
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


def _build_nodes(files: Sequence[CheckpointEntry]) -> list[Node]:
    """Return the checkpoints of a bucket whose files can be read, by version."""
    by_ref: dict[CheckpointRef, list[CheckpointEntry]] = {}
    for file in files:
        if file.header is not None:
            by_ref.setdefault(file.ref, []).append(file)
    nodes = []
    for ref, own_files in sorted(by_ref.items()):
        header = own_files[0].header
        assert header is not None, "only files with a header were added"
        nodes.append(
            Node(
                ref,
                header.parent,
                tuple(file.kind for file in own_files),
                header.writer.batch,
                header.writer.heartbeat,
                sum(file.entry.size_bytes for file in own_files),
            )
        )
    return nodes


def _find_children(nodes: Sequence[Node]) -> tuple[list[Node], dict[CheckpointRef, list[Node]]]:
    """Return the checkpoints whose parent has no file here, and the children of each checkpoint."""
    present = {node.ref for node in nodes}
    roots, children = [], dict[CheckpointRef, list[Node]]()
    for node in nodes:
        if node.parent is None or node.parent not in present:
            roots.append(node)
        else:
            children.setdefault(node.parent, []).append(node)
    return roots, children


def _format_tree(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a line for each checkpoint: an only child is not indented, branches are."""
    roots, children = _find_children(nodes)
    # Depth first, without recursion, because a lineage may be long.
    todo = [(node, "", "") for node in reversed(roots)]
    while todo:
        node, before, below = todo.pop()
        origin = (
            ""
            if node.parent is None or before or node not in roots
            else f" (builds on {_describe_missing_parent(node.parent)})"
        )
        yield f"{before}{node}{origin}"
        own_children = children.get(node.ref, [])
        if len(own_children) == 1:
            todo.append((own_children[0], below, below))
            continue
        branches = [(child, f"{below}├─ ", f"{below}│  ") for child in own_children[:-1]]
        branches += [(child, f"{below}└─ ", f"{below}   ") for child in own_children[-1:]]
        todo += reversed(branches)


def _describe_missing_parent(ref: CheckpointRef) -> str:
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
    lanes = _assign_lanes(nodes)
    by_ref = {node.ref: node for node in nodes}
    heights = max(lanes.values(), default=0) + 1
    versions = [node.ref.version for node in nodes] or [0]
    figure = Figure(figsize=(2 + _INCHES_EACH * (max(versions) - min(versions) + 1), 1.5 + 2 * _INCHES_EACH * heights))
    axes = figure.add_subplot()
    for node in nodes:
        if node.parent in by_ref:
            ends = [by_ref[node.parent], node]
            axes.plot([end.ref.version for end in ends], [lanes[end.ref] for end in ends], color="0.6", zorder=1)
        snapshot = SNAPSHOT in node.kinds
        axes.scatter(
            [node.ref.version], [lanes[node.ref]], marker="s" if snapshot else "o", color="C1" if snapshot else "C0"
        )
    # The title contains a folder's name, which must not be parsed as a formula.
    axes.set_title(printable(title), fontsize="small", parse_math=False)
    axes.set_xlabel("version (squares have a snapshot)")
    axes.set_yticks([])
    axes.margins(x=0.05, y=0.4)
    # The same tree gives the same file.
    options: Any = {"svg.hashsalt": "spark_state_ext"}
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    try:
        with matplotlib.rc_context(options):
            figure.savefig(path, metadata=metadata, bbox_inches="tight")
    except OSError as error:
        raise StorageError(f"the picture {path} cannot be written: {error}. Choose another place.") from error


def _assign_lanes(nodes: Sequence[Node]) -> dict[CheckpointRef, int]:
    """Assign a height to each checkpoint: a first child has its parent's height, every other child a new one."""
    roots, children = _find_children(nodes)
    lanes: dict[CheckpointRef, int] = {}
    used = 0
    todo: list[tuple[Node, int | None]] = [(node, None) for node in reversed(roots)]
    while todo:
        node, lane = todo.pop()
        if lane is None:
            lane, used = used, used + 1
        lanes[node.ref] = lane
        own_children = children.get(node.ref, [])
        todo += [(child, None if at else lane) for at, child in reversed(list(enumerate(own_children)))]
    return lanes
