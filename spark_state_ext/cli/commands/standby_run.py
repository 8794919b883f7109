"""``standby run``: the standby service of this host."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from spark_state_ext.cli.output import say
from spark_state_ext.cli.parameters import StorageOptions, options_of
from spark_state_ext.cli.peer_server import PeerOptions, address_of, serve_peers
from spark_state_ext.cli.targets import as_given
from spark_state_ext.engine.folders import scratch_folder
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import refuse_relative
from spark_state_ext.restore.lazy import lazy_bytes_min
from spark_state_ext.standby.metrics import StandbyCollector
from spark_state_ext.standby.roots import RootFollower
from spark_state_ext.standby.service import RootService, StandbyService
from spark_state_ext.standby.values import FollowedRoot
from spark_state_ext.standby.web import Web
from spark_state_ext.worker.host import host_name

__all__ = ["command"]


def command(
    roots: Annotated[
        list[str], typer.Argument(metavar="ROOT…", help="roots whose buckets are followed, as ArrowState has them")
    ],
    local_dir: Annotated[Path, typer.Option("--local-dir", help="the local_dir of the jobs on this host")],
    rack: Annotated[
        str | None, typer.Option("--rack", help="where this host stands: replicas stand in other racks, if there are")
    ] = None,
    bandwidth_max: Annotated[
        float | None,
        typer.Option("--bandwidth-max", min=1.0, metavar="BYTES", help="bytes read in a second; by default no limit"),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="buckets that are loaded at once")] = 2,
    keep_s: Annotated[
        float,
        typer.Option(
            "--keep", min=0.0, metavar="SECONDS", help="local stores that nobody used for so long are removed"
        ),
    ] = 86_400.0,
    address: Annotated[str, typer.Option("--address", help="where /healthz and /metrics listen")] = "0.0.0.0",
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="of /healthz and /metrics; by default there are none")
    ] = None,
    peer_listen: Annotated[
        str | None,
        typer.Option("--peer-listen", metavar="HOST:PORT", help="where other hosts may ask for what this one has"),
    ] = None,
    peer_address: Annotated[
        str | None, typer.Option("--peer-address", metavar="NAME", help="by which name others reach this host")
    ] = None,
    peer_secret_file: Annotated[
        Path | None, typer.Option("--peer-secret-file", help="else SPARK_STATE_EXT_PEER_SECRET has the secret")
    ] = None,
    peer_tls_cert: Annotated[Path | None, typer.Option("--peer-tls-cert", help="this host's certificate, PEM")] = None,
    peer_tls_key: Annotated[Path | None, typer.Option("--peer-tls-key", help="its private key, PEM")] = None,
    storage_options: StorageOptions = "{}",
) -> None:
    """Keep copies of buckets' state on this host, until it is told to stop (SIGTERM or SIGINT).

    Executors of this host find a copy as their own local store. They and this service must be of one user, and have the
    same local_dir, the same root to the letter, and the same SPARK_STATE_EXT_HOST.
    """
    stop = _stop_on_signals()
    _log_to_stderr()
    options, host = options_of(storage_options), host_name()
    gives_bytes_min = None if peer_listen is None else lazy_bytes_min()
    _refuse(roots, local_dir)
    # With a slash at its end too, where the job has one: local stores are named by it.
    followed = [FollowedRoot(root, options, str(local_dir), gives_bytes_min) for root in roots]
    followers = [RootFollower(root, threads_max=threads, bandwidth_max_bytes_s=bandwidth_max) for root in followed]
    peer = PeerOptions(peer_listen, peer_address, peer_secret_file, peer_tls_cert, peer_tls_key)
    with ExitStack() as opened:
        peers = serve_peers(peer, followers)
        if peers is not None:
            opened.callback(peers.close)
        reached = address_of(peers, peer)
        parts = [
            RootService(root, host, rack, it, addresses=reached) for root, it in zip(followed, followers, strict=True)
        ]
        service = StandbyService(parts, keep_s)
        told = [f"standby of {', '.join(root.name for root in service.roots)} on {host}"]
        told += [f"peers ask {it}" for it in reached.values()]
        if port is not None:
            collector = StandbyCollector(service, None if peers is None else peers.work)
            web = Web(address, port, service.ails, collector, service.warnings)
            opened.callback(web.close)
            told.append(f"port {web.port} has /healthz and /metrics")
        say("; ".join(told))
        service.run(stop)
    say("stopped")


def _stop_on_signals() -> threading.Event:
    """Set the event that is returned on SIGTERM and SIGINT."""
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stop


def _log_to_stderr() -> None:
    """Print what the service logs from INFO on, such as restores and takeovers, unless logging is already set up."""
    logger = logging.getLogger("spark_state_ext")
    if not logger.hasHandlers():
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
        logger.setLevel(logging.INFO)


def _refuse(roots: Iterable[str], local_dir: Path) -> None:
    """Raise an error for what no job has or finds: of the local folder now, and not for each bucket later."""
    if not local_dir.is_absolute():
        raise UsageError(f"--local-dir must be an absolute path, as that of ArrowState is, not {str(local_dir)!r}")
    given: dict[str, str] = {}
    for root in roots:
        refuse_relative(root, "the root")
        if as_given(root) in given:
            raise UsageError(f"{given[as_given(root)]} and {root} are one root: give it once, as ArrowState has it")
        given[as_given(root)] = root
    scratch_folder(str(local_dir))
