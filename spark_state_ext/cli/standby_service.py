"""Standby run: the service of this host, and the server that answers its peers."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from arrow_schemas.peers import PeerSecret
from spark_state_ext.cli.options import StorageOptions
from spark_state_ext.cli.output import say
from spark_state_ext.cli.paths import strip_slash
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import refuse_relative
from spark_state_ext.peers.finding import ADDRESS_KIND
from spark_state_ext.peers.serving import Tls
from spark_state_ext.peers.settings import SECRET_VARIABLE, pem_file
from spark_state_ext.restore.lazy import lazy_bytes_min
from spark_state_ext.standby.metrics import StandbyCollector
from spark_state_ext.standby.roots import ReplicaShelf, RootFollower
from spark_state_ext.standby.service import RootService, StandbyService
from spark_state_ext.standby.values import FollowedRoot
from spark_state_ext.standby.web import Web
from spark_state_ext.worker.host import host_name, machine_name
from spark_state_ext.worker.local_folders import scratch_folder

if TYPE_CHECKING:
    from spark_state_ext.peers.server import PeerServer

__all__ = ["PeerOptions", "build_addresses", "run", "serve_peers"]


def run(
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
    web_address: Annotated[str, typer.Option("--address", help="where /healthz and /metrics listen")] = "0.0.0.0",
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="of /healthz and /metrics; by default there are none")
    ] = None,
    *,
    peer: PeerOptions,
    storage_options: StorageOptions,
) -> None:
    """Keep copies of buckets' state on this host, until it is told to stop (SIGTERM or SIGINT).

    Executors of this host find a copy as their own local store. They and this service must be of one user, and have the
    same local_dir, the same root to the letter, and the same SPARK_STATE_EXT_HOST.
    """
    stop = _stop_on_signals()
    _log_to_stderr()
    host = host_name()
    gives_bytes_min = None if peer.listen is None else lazy_bytes_min()
    _refuse(roots, local_dir)
    # With a slash at its end too, where the job has one: local stores are named by it.
    followed = [FollowedRoot(root, storage_options, str(local_dir), gives_bytes_min) for root in roots]
    followers = [RootFollower(root, threads_max=threads, bandwidth_max_bytes_s=bandwidth_max) for root in followed]
    with ExitStack() as opened:
        peers = serve_peers(peer, followers)
        if peers is not None:
            opened.callback(peers.close)
        reached = build_addresses(peers, peer)
        parts = [
            RootService(root, host, rack, it, addresses=reached) for root, it in zip(followed, followers, strict=True)
        ]
        service = StandbyService(parts, keep_s)
        told = [f"standby of {', '.join(root.name for root in service.roots)} on {host}"]
        told += [f"peers ask {it}" for it in reached.values()]
        if port is not None:
            collector = StandbyCollector(service, None if peers is None else peers.work)
            web = Web(web_address, port, service.ails, collector, service.warnings)
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
        if strip_slash(root) in given:
            raise UsageError(f"{given[strip_slash(root)]} and {root} are one root: give it once, as ArrowState has it")
        given[strip_slash(root)] = root
    scratch_folder(str(local_dir))


_LISTEN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class PeerOptions:
    """What the command line says of peers."""

    listen: Annotated[
        str | None,
        typer.Option("--peer-listen", metavar="HOST:PORT", help="where other hosts may ask for what this one has"),
    ] = None
    address: Annotated[
        str | None, typer.Option("--peer-address", metavar="NAME", help="by which name others reach this host")
    ] = None
    secret_file: Annotated[
        Path | None, typer.Option("--peer-secret-file", help="else SPARK_STATE_EXT_PEER_SECRET has the secret")
    ] = None
    certificate: Annotated[Path | None, typer.Option("--peer-tls-cert", help="this host's certificate, PEM")] = None
    key: Annotated[Path | None, typer.Option("--peer-tls-key", help="its private key, PEM")] = None


def serve_peers(
    options: PeerOptions, followers: Sequence[RootFollower], environ: Mapping[str, str] = os.environ
) -> PeerServer | None:
    """Begin to give peers what the replicas of this host have; None where that is not wanted."""
    if options.listen is None:
        others = (options.address, options.secret_file, options.certificate, options.key)
        if any(it is not None for it in others):
            raise UsageError("options of peers need --peer-listen HOST:PORT, where they are answered")
        return None
    match = _LISTEN.fullmatch(options.listen)
    if match is None or int(match["port"]) > 65_535:
        raise UsageError(f"--peer-listen is {options.listen!r}: give HOST:PORT, such as 0.0.0.0:9465")
    secret, tls = _peer_secret(options, environ), _peer_tls(options)
    try:
        from spark_state_ext.peers.server import PeerServer
    except ImportError as error:
        raise UsageError(
            f"--peer-listen needs grpcio: pip install 'spark_state_ext[standby]', or leave --peer-listen out ({error})"
        ) from error
    return PeerServer(match["host"], int(match["port"]), secret, ReplicaShelf(followers), tls)


def build_addresses(server: PeerServer | None, options: PeerOptions) -> dict[str, str]:
    """What this host's record tells of where peers are answered."""
    if server is None:
        return {}
    return {ADDRESS_KIND: f"{server.scheme}://{options.address or machine_name()}:{server.port}"}


def _peer_secret(options: PeerOptions, environ: Mapping[str, str]) -> PeerSecret:
    if options.secret_file is None:
        text = environ.get(SECRET_VARIABLE)
        if not text:
            raise UsageError(f"peers need a secret: set {SECRET_VARIABLE}, or give --peer-secret-file")
        return PeerSecret.of(text)
    try:
        return PeerSecret.of(options.secret_file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--peer-secret-file {options.secret_file} cannot be read: {error!r}") from error


def _peer_tls(options: PeerOptions) -> Tls | None:
    if options.certificate is None or options.key is None:
        if options.certificate is not None or options.key is not None:
            raise UsageError("TLS needs both --peer-tls-cert and --peer-tls-key")
        return None
    return Tls(pem_file(options.certificate, "--peer-tls-cert"), pem_file(options.key, "--peer-tls-key"))
