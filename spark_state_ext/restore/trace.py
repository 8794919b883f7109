"""Which way leads to a checkpoint's state, where files are missing or damaged."""

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
    """See that a file is of the state that it was looked for in."""
    if header.operator not in operators or header.bucket != bucket:
        names = " or ".join(repr(name) for name in operators)
        raise LineageError(
            f"{where} belongs to bucket {header.bucket} of operator {header.operator!r}; bucket {bucket} of {names} "
            "was expected"
        )


class Trace:
    """What is found out about a checkpoint's files on the way to its state."""

    def __init__(self, sources: Sources, operator: str, bucket: int, kept_ms: int | None = None) -> None:
        self._sources = sources
        self._operator = operator
        self._bucket = bucket
        self._kept_ms = kept_ms
        self.gone: dict[Fetch, Failure] = {}

    def note(self, fetch: Fetch, failure: Failure) -> None:
        """A file is of no use, and why."""
        self.gone[fetch] = failure
        if fetch.kind == SNAPSHOT and not isinstance(failure, MissingCheckpointError):
            # A missing one was never confirmed. A damaged one is worth knowing of.
            _LOGGER.warning("%s; the lineage before it is used in its place", failure)

    def further_back(self, chain: Chain) -> Chain:
        """The chain as the delta of its first checkpoint continues it."""
        first = Fetch(chain.refs[chain.start], DELTA)
        if chain.rooted or any(fetch.kind == DELTA for fetch in self.gone):
            raise self._no_way(chain)
        try:
            header = self._sources.read(first.ref, DELTA, lambda files: read_header(files, first.ref, DELTA))
        except (CorruptFileError, LineageError, MissingCheckpointError) as error:
            # Not the end yet: snapshots from here on are worth a try.
            self.note(first, error)
            return chain
        _LOGGER.info("checkpoint %s has no snapshot; its lineage is traced further back", first.ref)
        return chain.extended(header, self._sources.where(first.ref, DELTA))

    def _no_way(self, chain: Chain) -> Failure | StorageError:
        """The error to raise when nothing leads to the state: of the kind that its first cause is."""
        # That a snapshot is not there says little: all are optional.
        telling = [f for fetch, f in self.gone.items() if fetch.kind == DELTA or isinstance(f, CorruptError)]
        causes = [f for f in telling if isinstance(f, CorruptError)] or telling
        tried = len(self.gone) - len(telling)
        what = f"checkpoint {chain.refs[-1]} of bucket {self._bucket} of operator {self._operator!r} cannot be loaded: "
        unreached = self._sources.unreached
        if unreached is not None:
            # One lacks what its replication status promises; that which does not answer may have it.
            waiting = StorageError(
                f"{what}{unreached}; and the others lack it: {'; '.join(map(str, telling))}. Nothing need be lost: try "
                "again when that backend answers."
            )
            waiting.__cause__ = unreached
            return waiting
        mend = "Bring the file back, or go back to an older Spark checkpoint whose files are whole."
        if self._kept_ms is not None:
            mend = (
                f"The job erases within {self._kept_ms * WINDOWS // 1000} s (erase_within_s), so it can go back to "
                f"batches of the last {self._kept_ms // 1000} s only: go back to a later batch, or bring the file back."
            )
        if self._sources.elsewhere:
            mend = (
                f"The state lies in {', '.join(self._sources.elsewhere)}, which the job does not name among its "
                "backends: name it, at least until every bucket has been copied. Where its files were moved, give the "
                "new place its old name."
            )
        elif causes is telling and self._kept_ms is None:
            mend += (
                " If the whole folder is gone: set root back if you changed it; otherwise start from a new checkpoint "
                "location."
            )
        missing = ""
        if tried:
            missing = " The file that could replace it does not exist either."
        if tried > 1:
            missing = f" None of the {tried} files that could replace it exists either."
        error: Failure = type(causes[0])(what + "; ".join(str(failure) for failure in telling) + f".{missing} {mend}")
        error.__cause__ = causes[0]
        return error
