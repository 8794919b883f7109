"""Identity of a local store: its format and the schema of its rows, recorded when it is first opened."""

from __future__ import annotations

import json

from arrow_schemas.row import RowSchema
from spark_state_ext.store.damage import rebuild_if_damaged
from spark_state_ext.store.shared_environment import SharedEnvironment
from spark_state_ext.store.transaction import Reader, Writer

__all__ = ["check_identity"]

_STORE_FORMAT = 6


def check_identity(environment: SharedEnvironment, schema: RowSchema) -> None:
    """Record format and schema on first use; if a store has others, discard it and begin an empty one."""
    identity = json.dumps({"format": _STORE_FORMAT, "schema": schema.arrow.to_string()}).encode()

    def read(txn: Reader) -> bytes | None:
        value = txn.get(b"meta", b"identity")
        return None if value is None else bytes(value)

    def record(txn: Writer) -> None:
        if txn.get(b"meta", b"identity") is None:
            txn.put(b"meta", b"identity", identity)

    def read_or_record() -> bytes | None:
        recorded = environment.read(read)
        if recorded is None:
            environment.write(record)
            recorded = environment.read(read)
        return recorded

    if rebuild_if_damaged(read_or_record, environment.discard) != identity:
        environment.discard()
        environment.write(record)
