"""Settings of peers from the environment of a process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from arrow_schemas.peers import PeerSecret
from spark_state_ext.errors import UsageError

__all__ = ["CA_VARIABLE", "SECRET_VARIABLE", "PeerSettings", "peer_settings", "pem_file"]

SECRET_VARIABLE = "SPARK_STATE_EXT_PEER_SECRET"
CA_VARIABLE = "SPARK_STATE_EXT_PEER_CA"


@dataclass(frozen=True)
class PeerSettings:
    """How to ask peers.

    Parameters
    ----------
    secret
        The secret shared with the peers.
    ca
        PEM certificates, one of which must have signed a peer's certificate; peers without TLS are not asked then.
        None: peers with TLS need a certificate that the system trusts.
    answer_s_max
        How long all answers to a question may take, in addition to the time for their bytes, seconds.
    """

    secret: PeerSecret
    ca: bytes | None = field(default=None, repr=False)
    answer_s_max: float = 1.0


def peer_settings(environ: Mapping[str, str] = os.environ) -> PeerSettings | None:
    """Return the settings from the environment; None if there is no secret, so peers are not asked."""
    text, ca = environ.get(SECRET_VARIABLE), environ.get(CA_VARIABLE)
    if not text:
        return None
    return PeerSettings(PeerSecret.of(text), None if not ca else pem_file(ca, CA_VARIABLE))


def pem_file(path: str | os.PathLike[str], given_by: str) -> bytes:
    """Return the bytes of a certificate's or a key's file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{given_by} names {path}, which cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise UsageError(f"{given_by} names {path}, which is not a PEM file: give a file that begins with -----BEGIN")
    return data
