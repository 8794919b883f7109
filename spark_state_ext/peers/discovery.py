"""Finds the peers that have replicas of each bucket: one listing of the hosts' records, and one read of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from arrow_schemas.standby import BucketKey, MemberRecord
from spark_state_ext.errors import CorruptError, MissingCheckpointError, StateError, VersionSkewError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.members import MEMBERS_FOLDER, STANDBY_FOLDER, RecordName
from spark_state_ext.worker.threads import map_in_parallel

__all__ = ["ADDRESS_KIND", "peers_below"]

_LOGGER = logging.getLogger("spark_state_ext")
# The key in `MemberRecord.addresses`.
ADDRESS_KIND = "flight"
_PARALLEL_MAX = 8


def peers_below(root: Folder, host: str) -> Mapping[BucketKey, tuple[str, ...]]:
    """Return the addresses of each bucket's peers: those that are in sync first.

    They include a host that has died for a while, as one look at the records cannot show which hosts are alive.
    """
    files = root.child(STANDBY_FOLDER, MEMBERS_FOLDER)
    newest: dict[str, RecordName] = {}
    for name in map(RecordName.parse, files.names()):
        if name is not None and name.host != host:
            newest[name.host] = max(newest.get(name.host, name), name, key=lambda record: record.heartbeat)
    if not newest:
        return {}
    records = map_in_parallel(
        "members", min(_PARALLEL_MAX, len(newest)), lambda name: _read_record(files, name), newest.values()
    )
    peers_of: dict[BucketKey, list[tuple[bool, str]]] = {}
    for record in records:
        address = None if record is None else record.addresses.get(ADDRESS_KIND)
        if record is not None and address is not None:
            for replica in record.replicas:
                if replica.version:
                    peers_of.setdefault(replica.key, []).append((not replica.in_sync, address))
    return {key: tuple(address for _, address in sorted(peers)) for key, peers in peers_of.items()}


def _read_record(files: Folder, name: RecordName) -> MemberRecord | None:
    # The host may have written the next record and deleted this one meanwhile.
    for candidate in (name, name._replace(heartbeat=name.heartbeat + 1)):
        try:
            return MemberRecord.decode(files.get(candidate.text), files.where(candidate.text))
        except MissingCheckpointError:
            continue
        except (CorruptError, VersionSkewError) as error:
            _LOGGER.warning("cannot ask %s as a peer: %s", name.host, error)
            return None
        except StateError as error:
            _LOGGER.warning("cannot ask %s as a peer, as its record cannot be read: %s", name.host, error)
            return None
    return None
