"""What a follower tells readers on its host: `open_live` answers from a replica as it does from a job's store."""

from __future__ import annotations

import contextlib
from pathlib import Path

from arrow_schemas.operator import OperatorFile
from spark_state_ext.errors import CorruptStoreError
from spark_state_ext.standby.line import Line
from spark_state_ext.store.committed import CommittedRecord, read_committed, write_committed
from spark_state_ext.worker.process import namespace

__all__ = ["tell_committed"]

# In the place of a run's plan.
_STANDBY = "standby "


def tell_committed(store_folder: Path, operator: OperatorFile, line: Line, noticed_ms: int) -> None:
    """Write down beside a local store which checkpoint in it is committed, as a call does.

    Nothing is told of an operator with a time to live: only its calls know by which clock rows have expired. And
    nothing where a call on this host has told later: it is the active task's, which knows more.
    """
    if operator.row_schema().expires:
        return
    with contextlib.suppress(CorruptStoreError):  # being written just now, or never whole: it is written anew
        before = read_committed(store_folder)
        if before is not None and not before.plan_id.startswith(_STANDBY) and before.called_ms >= noticed_ms:
            return
    writer = line.head.writer
    # What the newest file was built upon was the state before its batch.
    record = CommittedRecord(line.committed, writer.batch - 1, noticed_ms, f"{_STANDBY}{writer.run_id}", namespace())
    write_committed(store_folder, record, operator)
