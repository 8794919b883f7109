"""Which peers have replicas of which bucket: one listing of the hosts' records, and a read of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from arrow_schemas.standby import BucketKey, MemberRecord
from spark_state_ext.errors import CorruptError, MissingCheckpointError, StateError, VersionSkewError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.members import MEMBERS_FOLDER, STANDBY_FOLDER, RecordName
from spark_state_ext.worker.threads import side_by_side

__all__ = ["ADDRESS_KIND", "peers_below"]

_LOGGER = logging.getLogger("spark_state_ext")
# In `MemberRecord.addresses`.
ADDRESS_KIND = "flight"
_PARALLEL_MAX = 8


def peers_below(root: Folder, host: str) -> Mapping[BucketKey, tuple[str, ...]]:
    """Addresses of peers by bucket: those that have all of it first.

    A host that has died is among them for a while, as one look does not tell who lives.
    """
    files = root.child(STANDBY_FOLDER, MEMBERS_FOLDER)
    newest: dict[str, RecordName] = {}
    for name in map(RecordName.parse, files.names()):
        if name is not None and name.host != host:
            newest[name.host] = max(newest.get(name.host, name), name, key=lambda it: it.heartbeat)
    if not newest:
        return {}
    found = side_by_side("members", min(_PARALLEL_MAX, len(newest)), lambda it: _record(files, it), newest.values())
    having: dict[BucketKey, list[tuple[bool, str]]] = {}
    for record in found:
        address = None if record is None else record.addresses.get(ADDRESS_KIND)
        if record is not None and address is not None:
            for replica in record.replicas:
                if replica.version:
                    having.setdefault(replica.key, []).append((not replica.in_sync, address))
    return {key: tuple(address for _, address in sorted(its)) for key, its in having.items()}


def _record(files: Folder, name: RecordName) -> MemberRecord | None:
    # Its host may just have written the next one, and deleted this.
    for following in (name, name._replace(heartbeat=name.heartbeat + 1)):
        try:
            return MemberRecord.decode(files.get(following.text), files.where(following.text))
        except MissingCheckpointError:
            continue
        except (CorruptError, VersionSkewError) as error:
            _LOGGER.warning("%s is not asked as a peer: %s", name.host, error)
            return None
        except StateError as error:
            _LOGGER.warning("%s is not asked as a peer, as its record cannot be read: %s", name.host, error)
            return None
    return None
