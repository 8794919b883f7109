"""A file with pointers that were read from a checkpoint location when a query that starts from it was planned.

Only Spark can read its own state, and only when the client asks; executors need the pointers in the first batch. So a
task writes the pointers, unchanged, to a file below the new query's root.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from arrow_schemas.damage import describe_damage
from arrow_schemas.headers import encode_header, read_header
from arrow_schemas.lineage import BLAKE2B, BODY_KEY, BODY_PLACEHOLDER
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import CorruptFileError
from spark_state_ext.files.sealed_body import open_sealed, write_sealed

__all__ = ["Captured", "make_captured_name"]

_FORMAT = 1
_KEY = b"spark_state_ext.captured"
_ROWS = pa.schema([("bucket", pa.int32()), ("pointer", pa.binary())])


def make_captured_name(now_ms: int, plan_id: str) -> str:
    """Return the name of the file in the folder of notes about first batches; it is deleted together with these."""
    return f"{now_ms}-{plan_id}.start.arrow"


@dataclass(frozen=True)
class Captured:
    """The pointers of one operator as of one batch.

    Parameters
    ----------
    operator
        The operator.
    batch
        The batch that made the pointers.
    later
        Later batches that were committed when the pointers were read.
    hold_id
        The hold that protects their files.
    lease_number
        For a claim: number of the lease's newest record before the pointers were read, when the lease was free; 0 if it
        has no record.
    pointers
        The pointer of each bucket.
    """

    operator: str
    batch: int
    later: tuple[int, ...]
    hold_id: str
    lease_number: int
    pointers: Mapping[int, Pointer]

    def encode(self) -> bytes:
        """Return the file's bytes."""
        fields = {
            "format": _FORMAT,
            "operator": self.operator,
            "batch": self.batch,
            "later": list(self.later),
            "hold_id": self.hold_id,
            "lease_number": self.lease_number,
        }
        metadata = {**encode_header(_KEY, fields), BODY_KEY: BODY_PLACEHOLDER}
        columns = [
            pa.array(list(self.pointers), pa.int32()),
            pa.array([pointer.encode() for pointer in self.pointers.values()], pa.binary()),
        ]
        buffer = io.BytesIO()
        write_sealed(
            buffer, _ROWS.with_metadata(metadata), [pa.RecordBatch.from_arrays(columns, schema=_ROWS)], BLAKE2B
        )
        return buffer.getvalue()

    @staticmethod
    def decode(data: bytes, where: str) -> Captured:
        """Read the file's bytes; the same release writes and reads the file, during one start of a query."""
        body = open_sealed(pa.BufferReader(pa.py_buffer(data)), where)
        schema, mend = body.reader.schema, "plan the query again"
        text = read_header(schema.metadata, _KEY, where, "header of a start", mend)
        if not schema.remove_metadata().equals(_ROWS):
            raise CorruptFileError(f"{where} does not contain the pointers of a query: {mend}")
        try:
            fields = json.loads(text)
            rows = [row for batch in body.reader for row in batch.to_pylist()]
            return Captured(
                str(fields["operator"]),
                int(fields["batch"]),
                tuple(int(batch) for batch in fields["later"]),
                str(fields["hold_id"]),
                int(fields["lease_number"]),
                {int(row["bucket"]): Pointer.decode(row["pointer"]) for row in rows},
            )
        except (AttributeError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
            if isinstance(error, CorruptFileError):
                raise
            raise CorruptFileError(
                f"{where} cannot be read: {describe_damage(error)}. Plan the query again."
            ) from error
