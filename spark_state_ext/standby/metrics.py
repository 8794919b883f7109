"""Metrics of a standby service for Prometheus: computed for each scrape, from the results of the last rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from spark_state_ext.peers.served_snapshots import PeerWork
from spark_state_ext.standby.failovers import OUTCOMES
from spark_state_ext.standby.recovery import estimate_host_recovery_s
from spark_state_ext.standby.service import RootService, StandbyService
from spark_state_ext.standby.values import Followed, Lag

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["GAUGES", "StandbyCollector"]

_PREFIX = "spark_state_ext_standby"
_EACH = ("root", "operator")
# Help texts of gauges by operator, by name.
GAUGES: dict[str, str] = {
    "replicas": "Buckets that this host follows.",
    "replicas_in_sync": "Followed buckets of which this host has everything that it has seen.",
    "replica_bytes": "Size of the local stores of followed buckets, bytes.",
    "replica_rows": "Upper bound of the number of live rows in these local stores.",
    "lag_versions_max": "Most checkpoints that one replica is missing.",
    "lag_bytes": "Bytes of missing deltas of all replicas.",
    "lag_seconds_max": "Longest lag of one replica by the store's clock, seconds.",
    "replicas_failing": "Buckets whose last attempt to follow them failed.",
}
_COUNTERS: dict[str, tuple[str, str]] = {
    "read_bytes": ("read_bytes", "Bytes read of checkpoint files."),
    "read_files": ("read_files", "Checkpoint files read."),
    "load_seconds": ("step_s", "Time spent reading and loading checkpoint files, all threads together, seconds."),
}


class StandbyCollector:
    """Collects the metrics, for a registry of ``prometheus_client``."""

    def __init__(self, service: StandbyService, peers: PeerWork | None = None) -> None:
        self._service = service
        self._peers = peers

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: labels are unknown before the service has found something."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return all metrics with their current values."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        roots = self._service.roots
        up = GaugeMetricFamily(f"{_PREFIX}_root_up", "Whether the last round of a root succeeded.", labels=["root"])
        members = GaugeMetricFamily(f"{_PREFIX}_members", "Hosts whose standby services are alive.", labels=["root"])
        short = GaugeMetricFamily(
            f"{_PREFIX}_replicas_missing", "Replicas assigned to no host, as too few hosts are alive.", labels=["root"]
        )
        for root in roots:
            up.add_metric([root.name], float(root.name not in self._service.errors))
            members.add_metric([root.name], len(root.last.members.records))
            wanted = root.last.settings.replicas
            missing = sum(max(0, wanted - len(hosts)) for hosts in root.last.assignment.values())
            short.add_metric([root.name], missing)
        yield from (up, members, short)
        gauges = {
            name: GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=list(_EACH)) for name, text in GAUGES.items()
        }
        for root in roots:
            lags = root.follower.collect_lags()
            for operator, followed in _by_operator(root):
                for name, value in _gauges(
                    followed, [lag for key, lag in lags.items() if key.operator == operator]
                ).items():
                    gauges[name].add_metric([root.name, operator], value)
        yield from gauges.values()
        for name, (attribute, text) in _COUNTERS.items():
            family = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=["root"])
            for root in roots:
                family.add_metric([root.name], getattr(root.follower.work, attribute))
            yield family
        yield from _recovery(roots, GaugeMetricFamily)
        yield from _takeovers(roots, CounterMetricFamily)
        if self._peers is not None:
            questions = CounterMetricFamily(
                f"{_PREFIX}_peer_questions", "Questions of peers, by outcome.", labels=["outcome"]
            )
            for outcome, count in self._peers.questions.items():
                questions.add_metric([outcome], count)
            given = CounterMetricFamily(f"{_PREFIX}_peer_bytes", "Bytes of snapshots given to peers.")
            given.add_metric([], self._peers.given_bytes)
            yield from (questions, given)


def _by_operator(root: RootService) -> Iterator[tuple[str, list[Followed]]]:
    by_operator: dict[str, list[Followed]] = {}
    for key, followed in root.follower.collect_results().items():
        by_operator.setdefault(key.operator, []).append(followed)
    yield from sorted(by_operator.items())


def _gauges(followed: list[Followed], lags: list[Lag]) -> dict[str, float]:
    return {
        "replicas": len(followed),
        "replicas_in_sync": sum(replica.is_caught_up for replica in followed),
        "replica_bytes": sum(replica.size_bytes for replica in followed),
        "replica_rows": sum(replica.rows for replica in followed),
        "lag_versions_max": max((lag.versions for lag in lags), default=0),
        "lag_bytes": sum(lag.size_bytes for lag in lags),
        "lag_seconds_max": max((lag.seconds for lag in lags), default=0.0),
        "replicas_failing": sum(replica.error is not None for replica in followed),
    }


def _recovery(roots: Iterable[RootService], family: Any) -> Iterator[Metric]:
    """Yield metrics of restoring; a value that is still unknown has no sample."""
    texts = {
        "restore_bytes_per_s": "Bytes of checkpoint files that this host restores per second while it restores.",
        "restore_rows_per_s": "Rows of checkpoint files that this host loads per second while it restores.",
        "recover_s": "Estimated seconds until all that this host follows has caught up, at that rate.",
    }
    families = {name: family(f"{_PREFIX}_{name}", text, labels=["root"]) for name, text in texts.items()}
    for root in roots:
        rate = root.follower.restore_rate()
        values = (rate.bytes_per_s, rate.rows_per_s, estimate_host_recovery_s(root.last.replicas, rate.bytes_per_s))
        for name, value in zip(families, values, strict=True):
            if value is not None:
                families[name].add_metric([root.name], value)
    yield from families.values()


def _takeovers(roots: Iterable[RootService], family: Any) -> Iterator[Metric]:
    takeovers = family(
        f"{_PREFIX}_takeovers",
        "Buckets whose tasks moved to another host, by what they found there: a complete replica, a replica with "
        "missing checkpoints, no replica, or no standby service at all; failed=true if the previous host has died. "
        "Usually the service of the new host counts one: add up the counts of all hosts.",
        labels=["root", "outcome", "failed"],
    )
    lost = family(
        f"{_PREFIX}_members_lost",
        "Standby services of other hosts that this host has seen die, by what their hosts had: every host counts all "
        "of them, so take the largest increase.",
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
