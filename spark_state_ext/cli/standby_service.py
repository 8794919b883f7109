"""The command standby run: the standby service of this host, and the server for its peers."""

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
from spark_state_ext.peers.discovery import ADDRESS_KIND
from spark_state_ext.peers.served_snapshots import Tls
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
        list[str], typer.Argument(metavar="ROOT…", help="roots whose buckets to follow, as given to ArrowState")
    ],
    local_dir: Annotated[Path, typer.Option("--local-dir", help="the local_dir of the jobs on this host")],
    rack: Annotated[
        str | None,
        typer.Option("--rack", help="rack of this host: replicas are placed in other racks if there are any"),
    ] = None,
    bandwidth_max: Annotated[
        float | None,
        typer.Option(
            "--bandwidth-max", min=1.0, metavar="BYTES", help="bytes to read per second at most; by default no limit"
        ),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="number of buckets to load at the same time")] = 2,
    keep_s: Annotated[
        float,
        typer.Option("--keep", min=0.0, metavar="SECONDS", help="remove local stores that were unused for so long"),
    ] = 86_400.0,
    web_address: Annotated[str, typer.Option("--address", help="address for /healthz and /metrics")] = "0.0.0.0",
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="port for /healthz and /metrics; by default they are off"),
    ] = None,
    *,
    peer: PeerOptions,
    storage_options: StorageOptions,
) -> None:
    """Keep copies of buckets' state on this host, until it is stopped (SIGTERM or SIGINT).

    Executors of this host use a copy as their own local store. They and this service must run as the same user, with
    the same local_dir, exactly the same root, and the same SPARK_STATE_EXT_HOST.
    """
    stop = _stop_on_signals()
    _log_to_stderr()
    host = host_name()
    peer_bytes_min = None if peer.listen is None else lazy_bytes_min()
    _check_arguments(roots, local_dir)
    # The root is kept exactly as given, also with a slash at its end: the names of local stores depend on it.
    followed_roots = [FollowedRoot(root, storage_options, str(local_dir), peer_bytes_min) for root in roots]
    followers = [
        RootFollower(root, threads_max=threads, bandwidth_max_bytes_s=bandwidth_max) for root in followed_roots
    ]
    with ExitStack() as stack:
        peers = serve_peers(peer, followers)
        if peers is not None:
            stack.callback(peers.close)
        addresses = build_addresses(peers, peer)
        root_services = [
            RootService(root, host, rack, follower, addresses=addresses)
            for root, follower in zip(followed_roots, followers, strict=True)
        ]
        service = StandbyService(root_services, keep_s)
        messages = [f"standby of {', '.join(root.name for root in service.roots)} on {host}"]
        messages += [f"peers ask {follower}" for follower in addresses.values()]
        if port is not None:
            collector = StandbyCollector(service, None if peers is None else peers.work)
            web = Web(web_address, port, service.ails, collector, service.warnings)
            stack.callback(web.close)
            messages.append(f"port {web.port} has /healthz and /metrics")
        say("; ".join(messages))
        service.run(stop)
    say("stopped")


def _stop_on_signals() -> threading.Event:
    """Return an event that is set on SIGTERM and SIGINT."""
    stop = threading.Event()

    def set_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, set_stop)
    return stop


def _log_to_stderr() -> None:
    """Print what the service logs from INFO on, such as restores and takeovers, unless logging is already set up."""
    logger = logging.getLogger("spark_state_ext")
    if not logger.hasHandlers():
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
        logger.setLevel(logging.INFO)


def _check_arguments(roots: Iterable[str], local_dir: Path) -> None:
    """Refuse a local folder or roots that no job can have, now and not for each bucket later."""
    if not local_dir.is_absolute():
        raise UsageError(f"--local-dir must be an absolute path, as for ArrowState, not {str(local_dir)!r}")
    root_by_path: dict[str, str] = {}
    for root in roots:
        refuse_relative(root, "the root")
        if strip_slash(root) in root_by_path:
            raise UsageError(
                f"{root_by_path[strip_slash(root)]} and {root} are the same root: give it once, as given to ArrowState"
            )
        root_by_path[strip_slash(root)] = root
    scratch_folder(str(local_dir))


_LISTEN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class PeerOptions:
    """The options about peers."""

    listen: Annotated[
        str | None,
        typer.Option(
            "--peer-listen", metavar="HOST:PORT", help="address on which this host gives its copies to others"
        ),
    ] = None
    address: Annotated[
        str | None, typer.Option("--peer-address", metavar="NAME", help="name under which other hosts reach this one")
    ] = None
    secret_file: Annotated[
        Path | None,
        typer.Option("--peer-secret-file", help="file with the secret; by default SPARK_STATE_EXT_PEER_SECRET"),
    ] = None
    certificate: Annotated[Path | None, typer.Option("--peer-tls-cert", help="this host's certificate (PEM)")] = None
    key: Annotated[Path | None, typer.Option("--peer-tls-key", help="the certificate's private key (PEM)")] = None


def serve_peers(
    options: PeerOptions, followers: Sequence[RootFollower], environ: Mapping[str, str] = os.environ
) -> PeerServer | None:
    """Start the server that gives pieces of this host's replicas to peers; None if no address is given."""
    if options.listen is None:
        other_options = (options.address, options.secret_file, options.certificate, options.key)
        if any(value is not None for value in other_options):
            raise UsageError("options about peers need --peer-listen HOST:PORT")
        return None
    match = _LISTEN.fullmatch(options.listen)
    if match is None or int(match["port"]) > 65_535:
        raise UsageError(f"--peer-listen is {options.listen!r}: give HOST:PORT, such as 0.0.0.0:9465")
    secret, tls = _read_secret(options, environ), _read_tls(options)
    try:
        from spark_state_ext.peers.server import PeerServer
    except ImportError as error:
        raise UsageError(
            f"--peer-listen needs grpcio: pip install 'spark_state_ext[standby]', or leave --peer-listen out ({error})"
        ) from error
    return PeerServer(match["host"], int(match["port"]), secret, ReplicaShelf(followers), tls)


def build_addresses(server: PeerServer | None, options: PeerOptions) -> dict[str, str]:
    """Return the addresses for this host's record, at which peers reach its server."""
    if server is None:
        return {}
    return {ADDRESS_KIND: f"{server.scheme}://{options.address or machine_name()}:{server.port}"}


def _read_secret(options: PeerOptions, environ: Mapping[str, str]) -> PeerSecret:
    if options.secret_file is None:
        text = environ.get(SECRET_VARIABLE)
        if not text:
            raise UsageError(f"peers need a secret: set {SECRET_VARIABLE}, or give --peer-secret-file")
        return PeerSecret.of(text)
    try:
        return PeerSecret.of(options.secret_file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--peer-secret-file {options.secret_file} cannot be read: {error!r}") from error


def _read_tls(options: PeerOptions) -> Tls | None:
    if options.certificate is None or options.key is None:
        if options.certificate is not None or options.key is not None:
            raise UsageError("TLS needs both --peer-tls-cert and --peer-tls-key")
        return None
    return Tls(pem_file(options.certificate, "--peer-tls-cert"), pem_file(options.key, "--peer-tls-key"))
