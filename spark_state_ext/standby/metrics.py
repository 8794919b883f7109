"""Metrics of a standby service, for Prometheus: made when they are asked for, from what the last rounds found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from spark_state_ext.peers.serving import PeerWork
from spark_state_ext.standby.failovers import OUTCOMES
from spark_state_ext.standby.recovery import recover_host_s
from spark_state_ext.standby.service import RootService, StandbyService
from spark_state_ext.standby.values import Followed, Lag

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["GAUGES", "StandbyCollector"]

_PREFIX = "spark_state_ext_standby"
_EACH = ("root", "operator")
# By operator. Name, help, and how it is made of what is followed.
GAUGES: dict[str, str] = {
    "replicas": "Buckets that this host follows.",
    "replicas_in_sync": "Of these, buckets of which it has all that it has seen.",
    "replica_bytes": "Size of their local stores, bytes.",
    "replica_rows": "The most rows that are live in these.",
    "lag_versions_max": "Most checkpoints that one of them lacks.",
    "lag_bytes": "Bytes of deltas that they lack.",
    "lag_seconds_max": "Longest that one of them lags, by the store's clock, seconds.",
    "replicas_failing": "Buckets that could not be followed at the last try.",
}
_COUNTERS: dict[str, tuple[str, str]] = {
    "read_bytes": ("read_bytes", "Bytes read of checkpoint files."),
    "read_files": ("read_files", "Checkpoint files read."),
    "load_seconds": ("step_s", "Time in which they were read and loaded, all threads together, seconds."),
}


class StandbyCollector:
    """Collects them, for a registry of ``prometheus_client``."""

    def __init__(self, service: StandbyService, peers: PeerWork | None = None) -> None:
        self._service = service
        self._peers = peers

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not looked at before the service has found something."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        roots = self._service.roots
        up = GaugeMetricFamily(f"{_PREFIX}_root_up", "Whether the last round of a root succeeded.", labels=["root"])
        members = GaugeMetricFamily(f"{_PREFIX}_members", "Hosts whose standby services live.", labels=["root"])
        short = GaugeMetricFamily(
            f"{_PREFIX}_replicas_missing", "Replicas that no host is to have, as too few live.", labels=["root"]
        )
        for root in roots:
            up.add_metric([root.name], float(root.name not in self._service.errors))
            members.add_metric([root.name], len(root.last.members.records))
            wanted = root.last.settings.replicas
            missing = sum(max(0, wanted - len(hosts)) for hosts in root.last.assignment.values())
            short.add_metric([root.name], missing)
        yield from (up, members, short)
        gauges = {
            name: GaugeMetricFamily(f"{_PREFIX}_{name}", says, labels=list(_EACH)) for name, says in GAUGES.items()
        }
        for root in roots:
            lags = root.follower.lags()
            for operator, followed in _by_operator(root):
                for name, value in _gauges(
                    followed, [lag for key, lag in lags.items() if key.operator == operator]
                ).items():
                    gauges[name].add_metric([root.name, operator], value)
        yield from gauges.values()
        for name, (of, says) in _COUNTERS.items():
            family = CounterMetricFamily(f"{_PREFIX}_{name}", says, labels=["root"])
            for root in roots:
                family.add_metric([root.name], getattr(root.follower.work, of))
            yield family
        yield from _recovery(roots, GaugeMetricFamily)
        yield from _takeovers(roots, CounterMetricFamily)
        if self._peers is not None:
            questions = CounterMetricFamily(
                f"{_PREFIX}_peer_questions", "Questions of peers, by what became of them.", labels=["outcome"]
            )
            for outcome, count in self._peers.questions.items():
                questions.add_metric([outcome], count)
            given = CounterMetricFamily(f"{_PREFIX}_peer_bytes", "Bytes of snapshots given to peers.")
            given.add_metric([], self._peers.given_bytes)
            yield from (questions, given)


def _by_operator(root: RootService) -> Iterator[tuple[str, list[Followed]]]:
    found: dict[str, list[Followed]] = {}
    for key, followed in root.follower.followed().items():
        found.setdefault(key.operator, []).append(followed)
    yield from sorted(found.items())


def _gauges(followed: list[Followed], lags: list[Lag]) -> dict[str, float]:
    return {
        "replicas": len(followed),
        "replicas_in_sync": sum(it.is_caught_up for it in followed),
        "replica_bytes": sum(it.size_bytes for it in followed),
        "replica_rows": sum(it.rows for it in followed),
        "lag_versions_max": max((it.versions for it in lags), default=0),
        "lag_bytes": sum(it.size_bytes for it in lags),
        "lag_seconds_max": max((it.seconds for it in lags), default=0.0),
        "replicas_failing": sum(it.error is not None for it in followed),
    }


def _recovery(roots: Iterable[RootService], family: Any) -> Iterator[Metric]:
    """What is not known yet has no sample."""
    says = {
        "restore_bytes_per_s": "Bytes of checkpoint files that this host restores in a second, while it does.",
        "restore_rows_per_s": "Rows of these that it loads in a second, while it does.",
        "recover_s": "Estimated seconds until all that this host follows has caught up, at that rate.",
    }
    families = {name: family(f"{_PREFIX}_{name}", it, labels=["root"]) for name, it in says.items()}
    for root in roots:
        rate = root.follower.restore_rate()
        found = (rate.bytes_per_s, rate.rows_per_s, recover_host_s(root.last.replicas, rate.bytes_per_s))
        for name, value in zip(families, found, strict=True):
            if value is not None:
                families[name].add_metric([root.name], value)
    yield from families.values()


def _takeovers(roots: Iterable[RootService], family: Any) -> Iterator[Metric]:
    takeovers = family(
        f"{_PREFIX}_takeovers",
        "Buckets whose tasks began to run on another host, by what these found there: a replica with all of the state, "
        "one that lacked checkpoints, no replica, or no standby service at all; failed tells whether the host before "
        "has died. Mostly the service of the new host counts one: add up those of all hosts.",
        labels=["root", "outcome", "failed"],
    )
    lost = family(
        f"{_PREFIX}_members_lost",
        "Standby services of other hosts that this one has seen to die, by what their hosts had: each host counts all, "
        "so take the largest increase.",
        labels=["root", "role"],
    )
    for root in roots:
        counts = root.failovers.takeovers
        for outcome in OUTCOMES:
            for failed in (False, True):
                takeovers.add_metric([root.name, outcome, str(failed).lower()], counts[outcome, failed])
        for role in ("active", "standby"):
            lost.add_metric([root.name, role], root.failovers.members_lost[role])
    yield from (takeovers, lost)
