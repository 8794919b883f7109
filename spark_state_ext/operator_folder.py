"""The folder ``<root>/<operator>/<query id>``: its operator files, and who else is beside it."""

from __future__ import annotations

import logging
import threading

from arrow_schemas.operator import OperatorFile, operator_file_name, parse_operator_file_name
from spark_state_ext.errors import ExistingStateError
from spark_state_ext.folder import Folder

__all__ = ["admit"]

_LOGGER = logging.getLogger("spark_state_ext")
_admitted: dict[tuple[str, bytes], OperatorFile] = {}
_admitted_lock = threading.Lock()


def admit(operator_files: Folder, wanted: OperatorFile, strict: bool, *, again: bool = False) -> OperatorFile:
    """Compare a job with what is stored and write the operator file it needs. Done once a process and job.

    Parameters
    ----------
    operator_files
        The folder ``<root>/<operator>``.
    wanted
        The operator file the job asks for.
    strict
        Refuse to begin anew beside the state of another query.
    again
        Look at the files once more, whatever this process admitted before.

    Returns
    -------
    OperatorFile
        The one in force.

    Raises
    ------
    BucketCountChangedError, SchemaChangedError, FunctionChangedError
        When the stored state cannot serve the job.
    ExistingStateError
        When `strict` and another query's state is there.
    """
    key = (operator_files.identity, wanted.encode())
    with _admitted_lock:
        if again or key not in _admitted:
            _admitted[key] = _admit(operator_files, wanted, strict)
        return _admitted[key]


def _admit(operator_files: Folder, wanted: OperatorFile, strict: bool) -> OperatorFile:
    files = operator_files.child(wanted.query_id)
    stored = [n for n in map(parse_operator_file_name, files.names()) if n is not None]
    if stored:
        name = operator_file_name(max(stored))
        newest = OperatorFile.decode(files.get(name), files.where(name))
        in_force = newest.succeeded_by(wanted)
        if in_force is newest:
            return newest
    else:
        in_force = wanted
        _look_beside(operator_files, wanted, strict)
    files.put(operator_file_name(in_force.schema_id), in_force.encode())
    return in_force


def _look_beside(operator_files: Folder, wanted: OperatorFile, strict: bool) -> None:
    others = [name for name in operator_files.names() if name != wanted.query_id]
    if not others:
        return
    text = (
        f"operator {wanted.operator!r} begins without state under {operator_files.root}, where other queries "
        "have theirs: "
        f"{', '.join(others[:3])}{', …' if len(others) > 3 else ''}. A query finds its state through its Spark "
        "checkpoint: "
        "to go on with old state, start it with the old checkpointLocation."
    )
    if strict:
        raise ExistingStateError(text + " (strict=True refuses to begin anew here; use another operator name or root.)")
    _LOGGER.warning(text)
