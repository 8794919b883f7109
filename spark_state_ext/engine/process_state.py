"""`Shared`: what the calls of a worker process share."""

from __future__ import annotations

from spark_state_ext.commit.uploads import WorkerUploads
from spark_state_ext.engine.deferral import Differences, TaskEnds
from spark_state_ext.engine.first_query_folder import FirstQueryFolders
from spark_state_ext.engine.housekeeping import Housekeeping
from spark_state_ext.engine.replicas import Replicas
from spark_state_ext.engine.stores import Stores
from spark_state_ext.files.operator_catalog import OperatorCatalog
from spark_state_ext.ownership.holds import HoldWatch
from spark_state_ext.ownership.lease import LeaseRegistry
from spark_state_ext.peers.piece_requests import PeersByRoot
from spark_state_ext.timeline.records import EpochRegistry
from spark_state_ext.worker.background import Background, Foreground
from spark_state_ext.worker.memory import CallSizes
from spark_state_ext.worker.metrics import MetricsLogs
from spark_state_ext.worker.worker import Worker

__all__ = ["Shared"]


class Shared:
    """Registries and bounded caches for the calls of a process; a `Worker` owns them."""

    def __init__(self) -> None:
        self.background = Background()
        self.filling = Background()
        self.foreground = Foreground()
        self.uploads = WorkerUploads()
        self.peers = PeersByRoot()
        self.stores = Stores()
        self.memory = CallSizes()
        self.leases = LeaseRegistry()
        self.epochs = EpochRegistry()
        self.catalog = OperatorCatalog()
        self.first_query_folders = FirstQueryFolders()
        self.replicas = Replicas(self.background, self.uploads)
        self.holds = HoldWatch()
        self.housekeeping = Housekeeping(self.background, self.holds)
        self.task_ends = TaskEnds()
        self.differences = Differences()
        self.metrics = MetricsLogs()

    @staticmethod
    def of(worker: Worker) -> Shared:
        """Return the shared objects of a worker."""
        return worker.own(Shared)

    def close(self, timeout_s: float) -> None:
        """Wait for running work, then close what calls have opened.

        Spark's workers just end. This is for a process that continues after its calls.
        """
        self.background.wait(timeout_s)
        self.uploads.close(timeout_s)
        self.metrics.close()
        self.stores.close()
        self.housekeeping.probes.thread.close()
        self.background.close()
        self.filling.close()
        self.peers.close()
