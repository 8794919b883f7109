"""The files by which hosts coordinate standby replicas: the settings of a root, and the record of each host.

Both are JSON with a format number and a checksum, below `<root>/_standby` (`docs/design/009-standby.md`). Every other
host reads a record when it changes, so it is compact: replicas are grouped by query folder, in lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from arrow_schemas.checksum import open_document, report_damage, seal_document
from arrow_schemas.errors import CorruptFileError, UsageError

__all__ = [
    "MEMBER_FORMAT",
    "STANDBY_SETTINGS_FORMAT",
    "BucketKey",
    "MemberRecord",
    "StandbyReplica",
    "StandbySettings",
]

STANDBY_SETTINGS_FORMAT, MEMBER_FORMAT = 1, 2
_SETTINGS_MEND = "Write the settings again"
_MEMBER_MEND = "Its host writes the next record soon; remove this one if that host has no standby service"


class BucketKey(NamedTuple):
    """Identifies one bucket of a root."""

    operator: str
    query_folder: str
    bucket: int

    def __str__(self) -> str:
        return f"bucket {self.bucket} of {self.operator}/{self.query_folder}"


@dataclass(frozen=True)
class StandbySettings:
    """The standby settings that all hosts of a root follow.

    Parameters
    ----------
    enabled
        False: there are no standby replicas at all.
    standby_replicas
        How many replicas each bucket has, in addition to the state of its active task.
    heartbeat_s
        How often a host writes its record, in seconds.
    """

    enabled: bool = True
    standby_replicas: int = 1
    heartbeat_s: float = 10.0

    def __post_init__(self) -> None:
        if type(self.enabled) is not bool:
            raise UsageError(f"enabled must be true or false, not {self.enabled!r}")
        if not _is_count(self.standby_replicas):
            raise UsageError(f"standby_replicas must be a whole number of at least 0, not {self.standby_replicas!r}")
        if not _is_number(self.heartbeat_s) or self.heartbeat_s <= 0:
            raise UsageError(f"heartbeat_s must be a number of seconds above 0, not {self.heartbeat_s!r}")

    @property
    def replicas(self) -> int:
        """The number of replicas that a bucket must have; 0 if standby is disabled."""
        return self.standby_replicas if self.enabled else 0

    def encode(self) -> bytes:
        """Return the file's bytes."""
        return seal_document(
            {
                "format": STANDBY_SETTINGS_FORMAT,
                "enabled": self.enabled,
                "standby_replicas": self.standby_replicas,
                "heartbeat_s": self.heartbeat_s,
            }
        )

    @staticmethod
    def decode(data: bytes, where: str) -> StandbySettings:
        """Decode a settings file."""
        with report_damage(where, "standby settings file", _SETTINGS_MEND), _refuse_as_damage(where, _SETTINGS_MEND):
            fields = open_document(data, where, STANDBY_SETTINGS_FORMAT, _SETTINGS_MEND)
            return StandbySettings(fields["enabled"], fields["standby_replicas"], fields["heartbeat_s"])
        raise AssertionError("unreachable: readable raises what it catches")


@dataclass(frozen=True)
class StandbyReplica:
    """A host's standby replica of one bucket.

    Parameters
    ----------
    key
        The bucket.
    version
        Version of the newest checkpoint that the replica has; 0 if it has no checkpoint yet.
    bytes
        Size of the replica.
    in_sync
        True if the replica has everything of the bucket that the host has seen, or had it a moment ago.
    active
        The bucket's active host, by the header of the newest file that this host has seen; None if it has seen no file.
    lag_versions, lag_bytes, lag_s
        What the host has seen but the replica does not have: versions, bytes, and for how many seconds by the host's
        clock.
    """

    key: BucketKey
    version: int = 0
    bytes: int = 0
    in_sync: bool = False
    active: str | None = None
    lag_versions: int = 0
    lag_bytes: int = 0
    lag_s: float = 0.0

    def __post_init__(self) -> None:
        if not _is_key(self.key):
            raise UsageError(f"key must be an operator, a query folder and a bucket's number, not {self.key!r}")
        counts = (self.version, self.bytes, self.lag_versions, self.lag_bytes)
        if not all(map(_is_count, counts)) or not _is_number(self.lag_s) or self.lag_s < 0:
            raise UsageError(
                f"{self.key}: version, bytes and lags must be numbers of at least 0, not {(*counts, self.lag_s)}"
            )
        if type(self.in_sync) is not bool or not (self.active is None or _is_name(self.active)):
            raise UsageError(
                f"{self.key}: in_sync must be a bool, not {self.in_sync!r}, and active a host or None, "
                f"not {self.active!r}"
            )

    @property
    def seen_version(self) -> int:
        """The version of the newest file that the host has seen."""
        return self.version + self.lag_versions


@dataclass(frozen=True)
class MemberRecord:
    """The record that a host writes for the other hosts.

    Parameters
    ----------
    host
        The host's name.
    rack
        The host's rack, so that replicas can be on other racks; None if it is not configured.
    generation
        A number that changes whenever something changes that other hosts' decisions depend on (`decided_by`).
    replicas
        The host's replicas; they are sorted.
    addresses
        The host's addresses, by kind: ``{"flight": "host:port"}``.
    active
        The buckets whose newest file known to any host was written by this host, with that file's version. They are
        here so that they are known even if no host follows them.
    restore_bytes_per_s, restore_rows_per_s
        The host's speed while restoring; None if it has not measured that, and in records of format 1.
    failing
        Why this host could not follow a bucket when it last tried, by bucket. If there are many such buckets, some
        reasons are empty.
    doubled
        True if another service writes records under the same host name.
    """

    host: str
    rack: str | None = None
    generation: int = 1
    replicas: tuple[StandbyReplica, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=dict)
    active: Mapping[BucketKey, int] = field(default_factory=dict)
    restore_bytes_per_s: float | None = None
    restore_rows_per_s: float | None = None
    failing: Mapping[BucketKey, str] = field(default_factory=dict)
    doubled: bool = False

    def __post_init__(self) -> None:
        if not _is_name(self.host) or not (self.rack is None or _is_name(self.rack)) or not _is_count(self.generation):
            values = (self.host, self.rack, self.generation)
            raise UsageError(f"a member must have a host, a rack or None, and a generation of at least 0, not {values}")
        if not all(_is_name(kind) and _is_name(address) for kind, address in self.addresses.items()):
            raise UsageError(f"addresses of {self.host} must be strings by kind, not {dict(self.addresses)!r}")
        ordered = tuple(sorted(self.replicas, key=attrgetter("key")))
        twice = next((first.key for first, second in pairwise(ordered) if first.key == second.key), None)
        if twice is not None:
            raise UsageError(f"{self.host} has {twice} twice in its record")
        if not all(_is_key(key) and _is_count(version) for key, version in self.active.items()):
            raise UsageError(f"active buckets of {self.host} must be versions by bucket, not {dict(self.active)!r}")
        rates = (self.restore_bytes_per_s, self.restore_rows_per_s)
        if not all(rate is None or (_is_number(rate) and rate >= 0) for rate in rates):
            raise UsageError(f"rates of {self.host} must be numbers of at least 0, or None, not {rates!r}")
        reasons = all(_is_key(key) and isinstance(reason, str) for key, reason in self.failing.items())
        if not reasons or type(self.doubled) is not bool:
            raise UsageError(
                f"{self.host}: failing must be a reason by bucket, and doubled a bool, not {dict(self.failing)!r}, "
                f"{self.doubled!r}"
            )
        object.__setattr__(self, "replicas", ordered)
        for name in ("active", "failing"):
            object.__setattr__(self, name, dict(sorted(getattr(self, name).items())))
        object.__setattr__(self, "addresses", dict(sorted(self.addresses.items())))

    @property
    def decided_by(self) -> tuple[Any, ...]:
        """The part of the record that other hosts' decisions depend on: if it is equal, so is the generation.

        Versions, bytes, lags and rates are not part of it: they change with every batch, so each host would have to
        read every other host's record at every heartbeat.
        """
        replicas = tuple((replica.key, replica.in_sync, replica.active) for replica in self.replicas)
        return self.rack, replicas, tuple(self.active), tuple(self.addresses.items())

    def encode(self) -> bytes:
        """Return the file's bytes; equal contents give equal bytes."""
        active = sorted({replica.active for replica in self.replicas if replica.active is not None})
        index: dict[str | None, int] = {host: at for at, host in enumerate(active)}
        grouped = groupby(self.replicas, key=lambda replica: (replica.key.operator, replica.key.query_folder))
        # Empty fields are left out.
        wrong: dict[str, Any] = {"failing": _encode_by_bucket(self.failing, "reasons"), "doubled": self.doubled}
        return seal_document(
            {
                "format": MEMBER_FORMAT,
                "host": self.host,
                "rack": self.rack,
                "generation": self.generation,
                "addresses": dict(self.addresses),
                "restore_bytes_per_s": self.restore_bytes_per_s,
                "restore_rows_per_s": self.restore_rows_per_s,
                "active": _encode_by_bucket(self.active, "versions"),
                "active_hosts": active,
                "replicas": [_encode_replicas(folder, list(replicas), index) for folder, replicas in grouped],
                **{name: value for name, value in wrong.items() if value},
            }
        )

    @staticmethod
    def decode(data: bytes, where: str) -> MemberRecord:
        """Decode a host's record."""
        with report_damage(where, "record of a member", _MEMBER_MEND), _refuse_as_damage(where, _MEMBER_MEND):
            fields = open_document(data, where, MEMBER_FORMAT, _MEMBER_MEND)
            hosts = [*fields["active_hosts"], None]
            replicas = tuple(replica for columns in fields["replicas"] for replica in _decode_replicas(columns, hosts))
            # Format 1 does not have the rates.
            names = ("restore_bytes_per_s", "restore_rows_per_s") if fields["format"] > 1 else ()
            return MemberRecord(
                fields["host"],
                fields["rack"],
                fields["generation"],
                replicas,
                fields["addresses"],
                _decode_by_bucket(fields["active"], "versions", "active"),
                failing=_decode_by_bucket(fields.get("failing", []), "reasons", "failing"),
                doubled=fields.get("doubled", False),
                **{name: fields[name] for name in names},
            )
        raise AssertionError("unreachable: readable raises what it catches")


# Maps columns of a record to fields of `StandbyReplica` that are written unchanged; the other fields are encoded.
_PLAIN = {
    "versions": "version",
    "bytes": "bytes",
    "lag_versions": "lag_versions",
    "lag_bytes": "lag_bytes",
    "lag_s": "lag_s",
}


def _encode_replicas(
    folder: tuple[str, str], replicas: list[StandbyReplica], active: Mapping[str | None, int]
) -> dict[str, Any]:
    """Encode the replicas of one query folder; an active host becomes its index in `active`, and None becomes -1."""
    plain = {column: [getattr(replica, name) for replica in replicas] for column, name in _PLAIN.items()}
    return {
        "operator": folder[0],
        "query_folder": folder[1],
        "buckets": [replica.key.bucket for replica in replicas],
        "in_sync": [int(replica.in_sync) for replica in replicas],
        "active": [active.get(replica.active, -1) for replica in replicas],
        **plain,
    }


def _decode_replicas(columns: Mapping[str, Any], active: list[str | None]) -> Iterable[StandbyReplica]:
    """Decode what `_encode_replicas` returned; the last element of `active` is None."""
    operator, query_folder = columns["operator"], columns["query_folder"]
    names = ("buckets", "in_sync", "active", *_PLAIN)
    for bucket, in_sync, at, *plain in zip(*(columns[name] for name in names), strict=True):
        if type(in_sync) is not int or in_sync not in (0, 1) or type(at) is not int or not -1 <= at < len(active) - 1:
            raise ValueError(f"{operator}/{query_folder}/{bucket} has in_sync {in_sync!r} and active {at!r}")
        fields = dict(zip(_PLAIN.values(), plain, strict=True))
        yield StandbyReplica(
            BucketKey(operator, query_folder, bucket), in_sync=in_sync == 1, active=active[at], **fields
        )


def _encode_by_bucket(values: Mapping[BucketKey, Any], name: str) -> list[dict[str, Any]]:
    """Encode values by bucket, which are sorted, as one object for each query folder."""
    return [
        {
            "operator": operator,
            "query_folder": query_folder,
            "buckets": [key.bucket for key, _ in rows],
            name: [value for _, value in rows],
        }
        for (operator, query_folder), grouped in groupby(values.items(), key=lambda item: item[0][:2])
        for rows in [list(grouped)]
    ]


def _decode_by_bucket(folders: Iterable[Mapping[str, Any]], name: str, what: str) -> dict[BucketKey, Any]:
    """Decode what `_encode_by_bucket` returned."""
    rows = [
        (BucketKey(columns["operator"], columns["query_folder"], bucket), value)
        for columns in folders
        for bucket, value in zip(columns["buckets"], columns[name], strict=True)
    ]
    if len(dict(rows)) < len(rows):
        raise ValueError(f"{what} has a bucket twice")
    return dict(rows)


@contextmanager
def _refuse_as_damage(where: str, mend: str) -> Iterator[None]:
    """Report a constructor's refusal of decoded values as damage of the file."""
    try:
        yield
    except UsageError as error:
        raise CorruptFileError(f"{where} is not valid: {error}. {mend}") from error


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_key(value: tuple[object, object, object]) -> bool:
    operator, query_folder, bucket = value
    return _is_name(operator) and _is_name(query_folder) and _is_count(bucket)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""
