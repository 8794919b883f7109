"""Trace a way to a checkpoint's state if files are missing or damaged."""

from __future__ import annotations

import logging
from collections.abc import Collection

from arrow_schemas.lineage import DELTA, SNAPSHOT, LineageHeader
from spark_state_ext.errors import (
    CorruptError,
    CorruptFileError,
    LineageError,
    MissingCheckpointError,
    StorageError,
)
from spark_state_ext.files.checkpoint import read_header
from spark_state_ext.files.erasure import WINDOWS
from spark_state_ext.restore.load_plan import Chain, Fetch
from spark_state_ext.restore.sources import Sources

__all__ = ["Failure", "Trace", "check_owner"]

_LOGGER = logging.getLogger("spark_state_ext")

Failure = CorruptError | MissingCheckpointError


def check_owner(header: LineageHeader, operators: Collection[str], bucket: int, where: str) -> None:
    """Raise an error if a file belongs to another operator or bucket than expected."""
    if header.operator not in operators or header.bucket != bucket:
        names = " or ".join(repr(name) for name in operators)
        raise LineageError(
            f"{where} belongs to bucket {header.bucket} of operator {header.operator!r}; bucket {bucket} of {names} "
            "was expected"
        )


class Trace:
    """The unusable files that were found on the way to a checkpoint's state."""

    def __init__(self, sources: Sources, operator: str, bucket: int, kept_ms: int | None = None) -> None:
        self._sources = sources
        self._operator = operator
        self._bucket = bucket
        self._kept_ms = kept_ms
        self.gone: dict[Fetch, Failure] = {}

    def note(self, fetch: Fetch, failure: Failure) -> None:
        """Note that a file is unusable, and why."""
        self.gone[fetch] = failure
        if fetch.kind == SNAPSHOT and not isinstance(failure, MissingCheckpointError):
            # A missing snapshot was never confirmed, which is normal. A damaged one should be reported.
            _LOGGER.warning("%s; the lineage before it is used instead", failure)

    def trace_back(self, chain: Chain) -> Chain:
        """Return the chain extended by the lineage in the delta of its first checkpoint."""
        first = Fetch(chain.refs[chain.start], DELTA)
        if chain.rooted or any(fetch.kind == DELTA for fetch in self.gone):
            raise self._no_way_error(chain)
        try:
            header = self._sources.read(first.ref, DELTA, lambda files: read_header(files, first.ref, DELTA))
        except (CorruptFileError, LineageError, MissingCheckpointError) as error:
            # There is still hope: snapshots of later checkpoints may exist.
            self.note(first, error)
            return chain
        _LOGGER.info("checkpoint %s has no snapshot; its lineage is traced further back", first.ref)
        return chain.extend(header, self._sources.where(first.ref, DELTA))

    def _no_way_error(self, chain: Chain) -> Failure | StorageError:
        """Return the error to raise if there is no way to the state; its type is that of the first cause."""
        # A missing snapshot says little, as snapshots are optional.
        relevant = [f for fetch, f in self.gone.items() if fetch.kind == DELTA or isinstance(f, CorruptError)]
        causes = [f for f in relevant if isinstance(f, CorruptError)] or relevant
        missing_snapshots = len(self.gone) - len(relevant)
        problem = (
            f"checkpoint {chain.refs[-1]} of bucket {self._bucket} of operator {self._operator!r} cannot be loaded: "
        )
        unreached = self._sources.unreached
        if unreached is not None:
            # The backends that answered do not have what is needed; the one that did not answer may have it.
            unreached_error = StorageError(
                f"{problem}{unreached}; and the others do not have it: {'; '.join(map(str, relevant))}. Perhaps no "
                "state is lost: try again when that backend answers."
            )
            unreached_error.__cause__ = unreached
            return unreached_error
        advice = "Bring the file back, or go back to an older Spark checkpoint whose files are whole."
        if self._kept_ms is not None:
            advice = (
                f"The job erases within {self._kept_ms * WINDOWS // 1000} s (erase_within_s), so it can only go back "
                f"to batches of the last {self._kept_ms // 1000} s: go back to a later batch, or bring the file back."
            )
        if self._sources.elsewhere:
            advice = (
                f"The state lies in {', '.join(self._sources.elsewhere)}, which is not among the job's backends: add "
                "it, at least until every bucket has been copied. If its files were moved, give the new place its old "
                "name."
            )
        elif causes is relevant and self._kept_ms is None:
            advice += (
                " If the whole folder is gone: set root back if you changed it; otherwise start from a new checkpoint "
                "location."
            )
        missing = ""
        if missing_snapshots:
            missing = " The file that could replace it does not exist either."
        if missing_snapshots > 1:
            missing = f" The {missing_snapshots} files that could replace it do not exist either."
        error: Failure = type(causes[0])(
            problem + "; ".join(str(failure) for failure in relevant) + f".{missing} {advice}"
        )
        error.__cause__ = causes[0]
        return error
