"""What hosts tell each other of standby replicas: the settings of a root, and the record of each host.

Both are JSON with a format number and a checksum, below `<root>/_standby` (`docs/design/009-standby.md`). A record is
read by every other host when it changes, so it is compact: replicas are grouped by query folder, in lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from arrow_schemas.checksum import opened_document, readable, sealed_document
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
_MEMBER_MEND = "Its host writes the next one soon; remove it when that host has no standby service"


class BucketKey(NamedTuple):
    """Which bucket."""

    operator: str
    query_folder: str
    bucket: int

    def __str__(self) -> str:
        return f"bucket {self.bucket} of {self.operator}/{self.query_folder}"


@dataclass(frozen=True)
class StandbySettings:
    """What all hosts of a root go by.

    Parameters
    ----------
    enabled
        Whether there are standby replicas at all.
    standby_replicas
        How many a bucket has, beside the state of its active task.
    heartbeat_s
        How often a host writes its record.
    """

    enabled: bool = True
    standby_replicas: int = 1
    heartbeat_s: float = 10.0

    def __post_init__(self) -> None:
        if type(self.enabled) is not bool:
            raise UsageError(f"enabled must be true or false, not {self.enabled!r}")
        if not _is_count(self.standby_replicas):
            raise UsageError(f"standby_replicas must be a whole number from 0 on, not {self.standby_replicas!r}")
        if not _is_number(self.heartbeat_s) or self.heartbeat_s <= 0:
            raise UsageError(f"heartbeat_s must be a number of seconds above 0, not {self.heartbeat_s!r}")

    @property
    def replicas(self) -> int:
        """How many replicas a bucket is to have: 0 where standby is off."""
        return self.standby_replicas if self.enabled else 0

    def encode(self) -> bytes:
        """The file's bytes."""
        return sealed_document(
            {
                "format": STANDBY_SETTINGS_FORMAT,
                "enabled": self.enabled,
                "standby_replicas": self.standby_replicas,
                "heartbeat_s": self.heartbeat_s,
            }
        )

    @staticmethod
    def decode(data: bytes, where: str) -> StandbySettings:
        """Inverse of `encode`."""
        with readable(where, "settings of standby", _SETTINGS_MEND), _checked(where, _SETTINGS_MEND):
            fields = opened_document(data, where, STANDBY_SETTINGS_FORMAT, _SETTINGS_MEND)
            return StandbySettings(fields["enabled"], fields["standby_replicas"], fields["heartbeat_s"])
        raise AssertionError("unreachable: readable raises what it catches")


@dataclass(frozen=True)
class StandbyReplica:
    """What a host has of one bucket that it follows.

    Parameters
    ----------
    key
        Which bucket.
    version
        Version of the newest checkpoint that it has; 0 while it has none.
    bytes
        Size of what it has.
    in_sync
        Whether it has all that it has seen of the bucket, or had a moment ago.
    active
        Host in the header of the newest file that it has seen; None where it has seen none.
    lag_versions, lag_bytes, lag_s
        What it has seen and does not have: versions, bytes, and for how long by its own clock.
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
            raise UsageError(f"a replica is of an operator, a query folder and a bucket's number, not {self.key!r}")
        counts = (self.version, self.bytes, self.lag_versions, self.lag_bytes)
        if not all(map(_is_count, counts)) or not _is_number(self.lag_s) or self.lag_s < 0:
            raise UsageError(f"{self.key}: version, bytes and lag are numbers from 0 on, not {(*counts, self.lag_s)}")
        if type(self.in_sync) is not bool or not (self.active is None or _is_name(self.active)):
            raise UsageError(f"{self.key}: in_sync {self.in_sync!r}, active {self.active!r}: no truth value, no host")

    @property
    def seen_version(self) -> int:
        """Version of the newest file that its host has seen."""
        return self.version + self.lag_versions


@dataclass(frozen=True)
class MemberRecord:
    """What a host tells the others.

    Parameters
    ----------
    host
        Its name.
    rack
        Where it stands, so that replicas can stand elsewhere; None where nobody said.
    generation
        Changes whenever something changes by which others decide (`decided_by`).
    replicas
        What it has. They are put in order.
    addresses
        Where others reach it, by kind: ``{"flight": "host:port"}``.
    active
        Buckets of which this host wrote the newest file that anybody has told of, with that file's version. So that is
        known too where nobody follows them.
    restore_bytes_per_s, restore_rows_per_s
        What it has restored in a second, while it did; None where it has not measured that, and in records of format 1.
    failing
        By bucket why this host could not follow it when it last tried. Of many buckets some reasons are empty.
    doubled
        Whether another service writes records under the same host name.
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
            told = (self.host, self.rack, self.generation)
            raise UsageError(f"a member has a host, a rack or None, and a generation from 0 on, not {told}")
        if not all(_is_name(kind) and _is_name(address) for kind, address in self.addresses.items()):
            raise UsageError(f"addresses of {self.host} must be texts by kind, not {dict(self.addresses)!r}")
        ordered = tuple(sorted(self.replicas, key=attrgetter("key")))
        twice = next((one.key for one, other in pairwise(ordered) if one.key == other.key), None)
        if twice is not None:
            raise UsageError(f"{self.host} has {twice} twice in its record")
        if not all(_is_key(key) and _is_count(version) for key, version in self.active.items()):
            raise UsageError(f"{self.host} is active for what is no bucket at a version: {dict(self.active)!r}")
        rates = (self.restore_bytes_per_s, self.restore_rows_per_s)
        if not all(it is None or (_is_number(it) and it >= 0) for it in rates):
            raise UsageError(f"rates of {self.host} must be numbers from 0 on, or None, not {rates!r}")
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
        """What others decide by: records that are equal in this have one generation.

        Versions, bytes, lags and rates are not in it: they change with every batch, and then each host would read the
        record of each other one at every heartbeat.
        """
        held = tuple((it.key, it.in_sync, it.active) for it in self.replicas)
        return self.rack, held, tuple(self.active), tuple(self.addresses.items())

    def encode(self) -> bytes:
        """The file's bytes; equal contents give equal bytes."""
        active = sorted({it.active for it in self.replicas if it.active is not None})
        index: dict[str | None, int] = {host: at for at, host in enumerate(active)}
        grouped = groupby(self.replicas, key=lambda it: (it.key.operator, it.key.query_folder))
        # What there is nothing of is left out.
        wrong: dict[str, Any] = {"failing": _bucket_columns(self.failing, "reasons"), "doubled": self.doubled}
        return sealed_document(
            {
                "format": MEMBER_FORMAT,
                "host": self.host,
                "rack": self.rack,
                "generation": self.generation,
                "addresses": dict(self.addresses),
                "restore_bytes_per_s": self.restore_bytes_per_s,
                "restore_rows_per_s": self.restore_rows_per_s,
                "active": _bucket_columns(self.active, "versions"),
                "active_hosts": active,
                "replicas": [_columns(folder, list(replicas), index) for folder, replicas in grouped],
                **{name: told for name, told in wrong.items() if told},
            }
        )

    @staticmethod
    def decode(data: bytes, where: str) -> MemberRecord:
        """Inverse of `encode`."""
        with readable(where, "record of a member", _MEMBER_MEND), _checked(where, _MEMBER_MEND):
            fields = opened_document(data, where, MEMBER_FORMAT, _MEMBER_MEND)
            hosts = [*fields["active_hosts"], None]
            replicas = tuple(replica for columns in fields["replicas"] for replica in _rows(columns, hosts))
            # Format 1 does not tell them.
            names = ("restore_bytes_per_s", "restore_rows_per_s") if fields["format"] > 1 else ()
            return MemberRecord(
                fields["host"],
                fields["rack"],
                fields["generation"],
                replicas,
                fields["addresses"],
                _bucket_rows(fields["active"], "versions", "a bucket that it is active for"),
                failing=_bucket_rows(fields.get("failing", []), "reasons", "a bucket that fails"),
                doubled=fields.get("doubled", False),
                **{name: fields[name] for name in names},
            )
        raise AssertionError("unreachable: readable raises what it catches")


# Field of `StandbyReplica` by column of a record, as it is; buckets, `in_sync` and `active` are written in other forms.
_PLAIN = {
    "versions": "version",
    "bytes": "bytes",
    "lag_versions": "lag_versions",
    "lag_bytes": "lag_bytes",
    "lag_s": "lag_s",
}


def _columns(
    folder: tuple[str, str], replicas: list[StandbyReplica], active: Mapping[str | None, int]
) -> dict[str, Any]:
    """Replicas of one query folder; an active host is its place in a list, -1 for none."""
    plain = {column: [getattr(it, name) for it in replicas] for column, name in _PLAIN.items()}
    return {
        "operator": folder[0],
        "query_folder": folder[1],
        "buckets": [it.key.bucket for it in replicas],
        "in_sync": [int(it.in_sync) for it in replicas],
        "active": [active.get(it.active, -1) for it in replicas],
        **plain,
    }


def _rows(columns: Mapping[str, Any], active: list[str | None]) -> Iterable[StandbyReplica]:
    """Inverse of `_columns`; the last of `active` is None."""
    operator, query_folder = columns["operator"], columns["query_folder"]
    names = ("buckets", "in_sync", "active", *_PLAIN)
    for bucket, in_sync, at, *plain in zip(*(columns[name] for name in names), strict=True):
        if type(in_sync) is not int or in_sync not in (0, 1) or type(at) is not int or not -1 <= at < len(active) - 1:
            raise ValueError(f"in_sync {in_sync!r}, active {at!r} of {operator}/{query_folder}/{bucket}")
        fields = dict(zip(_PLAIN.values(), plain, strict=True))
        yield StandbyReplica(
            BucketKey(operator, query_folder, bucket), in_sync=in_sync == 1, active=active[at], **fields
        )


def _bucket_columns(values: Mapping[BucketKey, Any], name: str) -> list[dict[str, Any]]:
    """Values of buckets, which are in order, by query folder."""
    return [
        {
            "operator": operator,
            "query_folder": query_folder,
            "buckets": [key.bucket for key, _ in rows],
            name: [value for _, value in rows],
        }
        for (operator, query_folder), grouped in groupby(values.items(), key=lambda it: it[0][:2])
        for rows in [list(grouped)]
    ]


def _bucket_rows(folders: Iterable[Mapping[str, Any]], name: str, what: str) -> dict[BucketKey, Any]:
    """Inverse of `_bucket_columns`."""
    rows = [
        (BucketKey(columns["operator"], columns["query_folder"], bucket), value)
        for columns in folders
        for bucket, value in zip(columns["buckets"], columns[name], strict=True)
    ]
    if len(dict(rows)) < len(rows):
        raise ValueError(f"{what} is there twice")
    return dict(rows)


@contextmanager
def _checked(where: str, mend: str) -> Iterator[None]:
    """What a constructor refuses was refused because the bytes say so."""
    try:
        yield
    except UsageError as error:
        raise CorruptFileError(f"{where} cannot be right: {error}. {mend}") from error


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_key(value: tuple[object, object, object]) -> bool:
    operator, query_folder, bucket = value
    return _is_name(operator) and _is_name(query_folder) and _is_count(bucket)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""
