"""Commit phases as decisions: what a pointer may claim, and what becomes of a delta."""

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
SAID = {"state": "there"}


def _replicas(*names: str) -> list[Replica]:
    found: list[Replica] = []
    for name in names:
        (replica,) = sole_replica(Folder(f"memory://{name}"), Path("nothing is written"), name)
        found.append(replace(replica, root=name == "a"))
    return found


def _pointer(inline: range, **replication: ReplicationStatus) -> Pointer:
    return replace(
        first_pointer(),
        lineage=tuple(LineageEntry(ref, 10) for ref in _REFS),
        inline=tuple(InlineDelta(_REFS[version - 1], b"%d" % version, version, version) for version in inline),
        replication=replication,
    )


def _done(*confirmed: tuple[str, int]) -> dict[tuple[str, str], dict[str, str]]:
    return {(name, InlineDelta(_REFS[version - 1], b"", 0, 0).name): SAID for name, version in confirmed}


def _versions(pointer: Pointer) -> list[int]:
    return [delta.ref.version for delta in pointer.inline]


def test_inline_copies_are_dropped_when_every_backend_has_confirmed_them() -> None:
    pointer = _pointer(range(4, 7), a=ReplicationStatus(_REFS[2]), b=ReplicationStatus(_REFS[2]))
    assert settle(pointer, {}) == pointer
    after = settle(pointer, _done(("a", 4), ("a", 5)))
    assert after.replication == {"a": ReplicationStatus(_REFS[4]), "b": ReplicationStatus(_REFS[2])}
    assert (_versions(after), after.markers) == ([4, 5, 6], {"a": SAID})
    after = settle(after, _done(("b", 4)))
    assert (_versions(after), after.replication["b"].through) == ([5, 6], _REFS[3])
    after = settle(after, _done(("a", 6), ("b", 5), ("b", 6)))
    assert _versions(after) == []
    assert after.replication == {"a": ReplicationStatus(_REFS[5]), "b": ReplicationStatus(_REFS[5])}


def test_a_gap_stops_what_a_backend_is_known_to_have() -> None:
    """That 5 and 6 are there says nothing of 4."""
    pointer = _pointer(range(4, 7), a=ReplicationStatus(_REFS[2]))
    after = settle(pointer, _done(("a", 5), ("a", 6)))
    assert (after.replication["a"].through, _versions(after)) == (_REFS[2], [4, 5, 6])


def test_a_backend_that_catches_up_holds_everything_once_its_snapshot_is_there() -> None:
    pointer = _pointer(range(5, 7), a=ReplicationStatus(_REFS[4]), b=ReplicationStatus(_REFS[3], since=_REFS[3]))
    after = settle(pointer, _done(("a", 6), ("b", 5), ("b", 6)))
    # Its deltas count for what is kept inline; for a restore it does not count yet.
    assert (_versions(after), after.replication["b"]) == ([], ReplicationStatus(_REFS[5], _REFS[3]))
    assert not is_complete(after.replication["b"])
    after = settle(after, {("b", file_name(_REFS[3], SNAPSHOT)): {}})
    assert after.replication["b"] == ReplicationStatus(_REFS[5])


def test_while_nobody_has_anything_all_that_is_inline_stays() -> None:
    pointer = _pointer(range(4, 7))
    assert settle(pointer, {}) == pointer
    first = replace(
        _pointer(range(1, 3), a=ReplicationStatus(None)), lineage=(LineageEntry(_REFS[0], 1), LineageEntry(_REFS[1], 1))
    )
    assert settle(first, {}) == first
    assert settle(first, _done(("a", 1))).replication["a"] == ReplicationStatus(_REFS[0])


def test_how_configured_backends_see_an_input_pointer() -> None:
    new = first_pointer()
    assert adapt_to_backends(new, _replicas("a", "b")).replication == {
        "a": ReplicationStatus(None),
        "b": ReplicationStatus(None),
    }
    # Before format 4 pointers name no backend: they mean the root.
    old = _pointer(range(0))
    assert adapt_to_backends(old, _replicas("b", "a")).replication == {"a": ReplicationStatus(_REFS[5])}
    assert adapt_to_backends(old, _replicas("b")).replication == {}
    both = replace(
        _pointer(range(0), a=ReplicationStatus(_REFS[5]), b=ReplicationStatus(_REFS[4])), markers={"a": SAID, "b": SAID}
    )
    # What is configured no more loses its marker, and comes back as a stranger.
    only = adapt_to_backends(both, _replicas("b", "c"))
    assert (only.replication, only.markers) == ({"b": ReplicationStatus(_REFS[4])}, {"b": SAID})
    assert adapt_to_backends(both, _replicas("c")).replication == {}


def test_what_is_pending_is_in_order_for_each_backend() -> None:
    pointer = _pointer(range(4, 7), a=ReplicationStatus(_REFS[4]), b=ReplicationStatus(None))
    assert [(name, delta.ref.version) for name, delta in list_pending(pointer)] == [
        ("a", 6),
        ("b", 4),
        ("b", 5),
        ("b", 6),
    ]


def test_what_all_have_confirmed() -> None:
    pointer = _pointer(range(4, 7), a=ReplicationStatus(_REFS[4]), b=ReplicationStatus(_REFS[3], _REFS[3]))
    after = assume_confirmed(pointer, {"a": SAID})
    assert after.replication == {"a": ReplicationStatus(_REFS[5]), "b": ReplicationStatus(_REFS[5], _REFS[3])}
    assert (after.inline, after.markers) == ((), {"a": SAID, "b": {}})


@pytest.mark.parametrize(
    ("size", "inline", "room", "may_defer", "how"),
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
def test_what_becomes_of_a_delta(size: int, inline: int, room: int, may_defer: bool, how: DeltaHandling) -> None:
    assert choose_handling(size, inline, room, may_defer, CommitOptions(inline_bytes_max=100)) == how
    # Without a journal, and in the old format, nothing but waiting will do.
    assert choose_handling(size, inline, room, may_defer, CommitOptions(journal=False)) == DeltaHandling.WAITED
    for write in (V1, BOTH):
        assert (
            choose_handling(size, inline, room, may_defer, CommitOptions(pointer_write=write)) == DeltaHandling.WAITED
        )
