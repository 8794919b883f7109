"""What ``standby run`` is told of peers, and the server that comes of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arrow_schemas.peers import PeerSecret
from spark_state_ext.errors import UsageError
from spark_state_ext.peers.finding import ADDRESS_KIND
from spark_state_ext.peers.serving import Tls
from spark_state_ext.peers.settings import SECRET_VARIABLE, pem_file
from spark_state_ext.standby.roots import ReplicaShelf, RootFollower
from spark_state_ext.worker.host import machine_name

if TYPE_CHECKING:
    from spark_state_ext.peers.server import PeerServer

__all__ = ["PeerOptions", "address_of", "serve_peers"]

_LISTEN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class PeerOptions:
    """As the command line has them.

    Parameters
    ----------
    listen
        ``HOST:PORT``; None: peers get nothing.
    address
        By which name others reach this host; None: what the machine is called.
    secret_file
        The file with the secret; None: the environment has it.
    certificate, key
        Files for TLS, both or none.
    """

    listen: str | None = None
    address: str | None = None
    secret_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


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
    secret, tls = _secret(options, environ), _tls(options)
    try:
        from spark_state_ext.peers.server import PeerServer
    except ImportError as error:
        raise UsageError(
            f"--peer-listen needs grpcio: pip install 'spark_state_ext[standby]', or leave --peer-listen out ({error})"
        ) from error
    return PeerServer(match["host"], int(match["port"]), secret, ReplicaShelf(followers), tls)


def address_of(server: PeerServer | None, options: PeerOptions) -> dict[str, str]:
    """What this host's record tells of where peers are answered."""
    if server is None:
        return {}
    return {ADDRESS_KIND: f"{server.scheme}://{options.address or machine_name()}:{server.port}"}


def _secret(options: PeerOptions, environ: Mapping[str, str]) -> PeerSecret:
    if options.secret_file is None:
        text = environ.get(SECRET_VARIABLE)
        if not text:
            raise UsageError(f"peers need a secret: set {SECRET_VARIABLE}, or give --peer-secret-file")
        return PeerSecret.of(text)
    try:
        return PeerSecret.of(options.secret_file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--peer-secret-file {options.secret_file} cannot be read: {error!r}") from error


def _tls(options: PeerOptions) -> Tls | None:
    if options.certificate is None or options.key is None:
        if options.certificate is not None or options.key is not None:
            raise UsageError("TLS needs both --peer-tls-cert and --peer-tls-key")
        return None
    return Tls(pem_file(options.certificate, "--peer-tls-cert"), pem_file(options.key, "--peer-tls-key"))
