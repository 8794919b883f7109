"""Decisions of a commit: what a pointer may claim, and how a delta is stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from core_support import first_pointer

from arrow_schemas import CheckpointRef, LineageEntry, Pointer
from arrow_schemas.lineage import SNAPSHOT, file_name
from arrow_schemas.pointer import BOTH, V1, InlineDelta, ReplicationStatus
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.replication import Replica, adapt_to_backends, is_complete
from spark_state_ext.commit.decisions import (
    CommitOptions,
    DeltaHandling,
    assume_confirmed,
    choose_handling,
    list_pending,
    settle,
)
from spark_state_ext.files.folder import Folder
from spark_state_ext.testing.model import Refs

_REFS = [Refs().next(1), *(CheckpointRef(version, f"{version:032x}") for version in range(2, 7))]
MARKERS = {"state": "there"}


def _make_replicas(*names: str) -> list[Replica]:
    replicas: list[Replica] = []
    for name in names:
        (replica,) = sole_replica(Folder(f"memory://{name}"), Path("nothing is written"), name)
        replicas.append(replace(replica, root=name == "a"))
    return replicas


def _make_pointer(inline: range, **replication: ReplicationStatus) -> Pointer:
    return replace(
        first_pointer(),
        lineage=tuple(LineageEntry(ref, 10) for ref in _REFS),
        inline=tuple(InlineDelta(_REFS[version - 1], b"%d" % version, version, version) for version in inline),
        replication=replication,
    )


def _make_markers(*confirmed: tuple[str, int]) -> dict[tuple[str, str], dict[str, str]]:
    return {(name, InlineDelta(_REFS[version - 1], b"", 0, 0).name): MARKERS for name, version in confirmed}


def _list_versions(pointer: Pointer) -> list[int]:
    return [delta.ref.version for delta in pointer.inline]


def test_inline_deltas_are_dropped_once_every_backend_has_confirmed_them() -> None:
    pointer = _make_pointer(range(4, 7), a=ReplicationStatus(_REFS[2]), b=ReplicationStatus(_REFS[2]))
    assert settle(pointer, {}) == pointer
    after = settle(pointer, _make_markers(("a", 4), ("a", 5)))
    assert after.replication == {"a": ReplicationStatus(_REFS[4]), "b": ReplicationStatus(_REFS[2])}
    assert (_list_versions(after), after.markers) == ([4, 5, 6], {"a": MARKERS})
    after = settle(after, _make_markers(("b", 4)))
    assert (_list_versions(after), after.replication["b"].through) == ([5, 6], _REFS[3])
    after = settle(after, _make_markers(("a", 6), ("b", 5), ("b", 6)))
    assert _list_versions(after) == []
    assert after.replication == {"a": ReplicationStatus(_REFS[5]), "b": ReplicationStatus(_REFS[5])}


def test_a_backend_is_confirmed_only_up_to_the_first_gap() -> None:
    """Confirmed deltas 5 and 6 do not imply that 4 has arrived."""
    pointer = _make_pointer(range(4, 7), a=ReplicationStatus(_REFS[2]))
    after = settle(pointer, _make_markers(("a", 5), ("a", 6)))
    assert (after.replication["a"].through, _list_versions(after)) == (_REFS[2], [4, 5, 6])


def test_a_bootstrapping_backend_is_complete_once_its_snapshot_arrives() -> None:
    pointer = _make_pointer(range(5, 7), a=ReplicationStatus(_REFS[4]), b=ReplicationStatus(_REFS[3], since=_REFS[3]))
    after = settle(pointer, _make_markers(("a", 6), ("b", 5), ("b", 6)))
    # Its confirmed deltas need no inline copies, but a restore cannot use this backend yet.
    assert (_list_versions(after), after.replication["b"]) == ([], ReplicationStatus(_REFS[5], _REFS[3]))
    assert not is_complete(after.replication["b"])
    after = settle(after, {("b", file_name(_REFS[3], SNAPSHOT)): {}})
    assert after.replication["b"] == ReplicationStatus(_REFS[5])


def test_inline_deltas_are_kept_while_no_backend_has_confirmed_any() -> None:
    pointer = _make_pointer(range(4, 7))
    assert settle(pointer, {}) == pointer
    first = replace(
        _make_pointer(range(1, 3), a=ReplicationStatus(None)),
        lineage=(LineageEntry(_REFS[0], 1), LineageEntry(_REFS[1], 1)),
    )
    assert settle(first, {}) == first
    assert settle(first, _make_markers(("a", 1))).replication["a"] == ReplicationStatus(_REFS[0])


def test_a_pointer_is_adapted_to_the_configured_backends() -> None:
    new = first_pointer()
    assert adapt_to_backends(new, _make_replicas("a", "b")).replication == {
        "a": ReplicationStatus(None),
        "b": ReplicationStatus(None),
    }
    # Before format 4, pointers do not name backends: they refer to the root.
    old = _make_pointer(range(0))
    assert adapt_to_backends(old, _make_replicas("b", "a")).replication == {"a": ReplicationStatus(_REFS[5])}
    assert adapt_to_backends(old, _make_replicas("b")).replication == {}
    both = replace(
        _make_pointer(range(0), a=ReplicationStatus(_REFS[5]), b=ReplicationStatus(_REFS[4])),
        markers={"a": MARKERS, "b": MARKERS},
    )
    # A backend that is no longer configured loses its marker; if it returns, it is new.
    remaining = adapt_to_backends(both, _make_replicas("b", "c"))
    assert (remaining.replication, remaining.markers) == ({"b": ReplicationStatus(_REFS[4])}, {"b": MARKERS})
    assert adapt_to_backends(both, _make_replicas("c")).replication == {}


def test_pending_deltas_are_in_order_for_each_backend() -> None:
    pointer = _make_pointer(range(4, 7), a=ReplicationStatus(_REFS[4]), b=ReplicationStatus(None))
    assert [(name, delta.ref.version) for name, delta in list_pending(pointer)] == [
        ("a", 6),
        ("b", 4),
        ("b", 5),
        ("b", 6),
    ]


def test_a_pointer_can_assume_that_every_backend_confirms() -> None:
    pointer = _make_pointer(range(4, 7), a=ReplicationStatus(_REFS[4]), b=ReplicationStatus(_REFS[3], _REFS[3]))
    after = assume_confirmed(pointer, {"a": MARKERS})
    assert after.replication == {"a": ReplicationStatus(_REFS[5]), "b": ReplicationStatus(_REFS[5], _REFS[3])}
    assert (after.inline, after.markers) == ((), {"a": MARKERS, "b": {}})


@pytest.mark.parametrize(
    ("size", "inline", "room", "may_defer", "handling"),
    [
        (10, 0, 100, False, DeltaHandling.INLINE),
        (10, 90, 100, False, DeltaHandling.INLINE),
        (10, 91, 100, True, DeltaHandling.DEFERRED),
        (10, 91, 100, False, DeltaHandling.WAITED),
        (101, 0, 1_000, True, DeltaHandling.DEFERRED),
        (10, 0, 9, True, DeltaHandling.DEFERRED),
        (10, 0, 9, False, DeltaHandling.WAITED),
        (0, 100, 0, False, DeltaHandling.INLINE),
    ],
)
def test_a_delta_is_inline_deferred_or_waited_for_by_size(
    size: int, inline: int, room: int, may_defer: bool, handling: DeltaHandling
) -> None:
    assert choose_handling(size, inline, room, may_defer, CommitOptions(inline_bytes_max=100)) == handling
    # Without a journal, and in the old format, the call must wait.
    assert choose_handling(size, inline, room, may_defer, CommitOptions(journal=False)) == DeltaHandling.WAITED
    for write in (V1, BOTH):
        assert (
            choose_handling(size, inline, room, may_defer, CommitOptions(pointer_write=write)) == DeltaHandling.WAITED
        )
