"""The kind of each file of a query folder follows from its path."""

from __future__ import annotations

import pytest

from spark_state_ext.files.layout import (
    ASSIGNMENT,
    CHECKPOINT,
    CLAIM_NOTE,
    EPOCH,
    ERASE_DONE,
    ERASE_REQUEST,
    HOLD,
    LEASE,
    OPERATOR,
    PARENT,
    SPILL,
    START,
    FileKind,
    kind_of,
)

ID = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (f"0/1_{ID}.delta.arrow", CHECKPOINT),
        (f"12/3_{ID}.snapshot.arrow", CHECKPOINT),
        ("operator_0.json", OPERATOR),
        ("partitions_10.json", ASSIGNMENT),
        ("lease/0000000000000001.json", LEASE),
        ("lease.json", LEASE),
        (f"holds/{ID}-00000001.json", HOLD),
        ("erase/00000001.keys.arrow", ERASE_REQUEST),
        ("erase/00000001.done.json", ERASE_DONE),
        ("epochs/0000000000000007.json", EPOCH),
        (f"claims/{ID}.json", CLAIM_NOTE),
        ("start.json", START),
        ("detached.json", START),
        ("left_behind.json", START),
        (f"held-{ID}.start.arrow", START),
        ("parents/0.parent.json", PARENT),
        (f"parents/0/1_{ID}.delta.arrow", PARENT),
        ("spill/a/b", SPILL),
    ],
)
def test_the_path_gives_the_kind_of_a_file(path: str, kind: FileKind) -> None:
    assert kind_of(path) is kind


@pytest.mark.parametrize(
    "path",
    [
        "3/foo.delta.arrow",
        f"x/1_{ID}.delta.arrow",
        f"1_{ID}.delta.arrow",
        "operator_007.json",
        "q/operator_0.json",
        "partitions_٣.json",
        "erase/1.keys.arrow",
        "erase/notes.txt",
        "lease/a/b",
        "lease/.tmp-1",
        "claims/readme.txt",
        "q/start.json",
        "notes.txt",
    ],
)
def test_foreign_and_unfinished_files_have_no_kind(path: str) -> None:
    assert kind_of(path) is None
