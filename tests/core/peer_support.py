"""A bucket whose files are in two stores, a host with a replica and a task on another host, for the tests of peers."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from lazy_bucket import SCHEMA, Later, Remote, bucket_on, looked_up, values_of

from arrow_schemas import OperatorFile
from arrow_schemas.operator import operator_file_name
from arrow_schemas.peers import PeerSecret
from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.folder import Folder
from spark_state_ext.peers.discovery import ADDRESS_KIND
from spark_state_ext.peers.piece_requests import Peers
from spark_state_ext.peers.served_snapshots import Shelf, Tls
from spark_state_ext.peers.server import PeerServer
from spark_state_ext.peers.settings import PeerSettings
from spark_state_ext.standby.members import Membership
from spark_state_ext.standby.roots import ReplicaShelf, RootFollower
from spark_state_ext.standby.values import FollowedRoot
from spark_state_ext.store import LocalStore
from tests.helpers.clock import VirtualClock
from tests.helpers.waiting import WAIT_S

__all__ = ["KEY", "SECRET", "SECRET_TEXT", "PeerWorld", "certified", "service_of"]

SECRET_TEXT = "a secret that nobody guesses"
SECRET = PeerSecret.of(SECRET_TEXT)
KEY = BucketKey("counts", "query", 3)
ROOT = Path(__file__).parents[2]


def make_operator_file() -> OperatorFile:
    """Return an operator file for the rows of `lazy_bucket`."""

    def schema(columns: dict[str, Any]) -> str:
        fields = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in columns.items()]
        return json.dumps({"type": "struct", "fields": fields})

    tags = {"type": "array", "elementType": "long", "containsNull": True}
    state = {"n": "long", "note": "string", "raw": "binary", "tags": tags, "flag": "boolean"}
    operator_file = OperatorFile(KEY.operator, KEY.query_folder, 8, schema({"k": "long"}), schema(state))
    assert operator_file.row_schema().arrow.equals(SCHEMA.arrow)
    return operator_file


class PeerWorld:
    """A bucket whose files are on a disk, where host b follows them, and in a remote store, from which host a reads.

    Parameters
    ----------
    base
        Folder of a test.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.remote = Remote.made(base)
        self.remote.pointer = replace(self.remote.pointer, query_folder=KEY.query_folder)
        self.root = Folder(str(base / "root"))
        self.root.child(*KEY[:2]).put(operator_file_name(0), make_operator_file().encode())
        files = self.root.child(*KEY[:2], str(KEY.bucket))
        for name in self.remote.folder.names():
            files.put(name, self.remote.folder.get(name))
        self.clock = VirtualClock()
        self.later = Later()
        self.peers: Peers | None = None
        self._closing: list[Callable[[], object]] = []
        (base / "b").mkdir()

    def close(self) -> None:
        """Close all servers, followers and stores."""
        while self._closing:
            self._closing.pop()()

    # -- host b -------------------------------------------------------------------------------------

    def followed(self) -> RootFollower:
        """Let host b follow the bucket until it has a replica."""
        follower = RootFollower(FollowedRoot(self.root.root, {}, str(self.base / "b")))
        self._closing.append(follower.close)
        follower.hold(follower.find().operators)
        follower.tick()
        assert follower.drain(WAIT_S)
        follower.tick()
        assert follower.collect_results()[KEY].is_caught_up
        return follower

    def replica(self) -> Path:
        """Return the file of host b's snapshot."""
        (snapshot_file,) = (self.base / "b").rglob("base-*.arrow")
        return snapshot_file

    def serves(self, shelf: Shelf | None = None, secret: PeerSecret = SECRET, tls: Tls | None = None) -> PeerServer:
        """Let host b answer peers and publish its address."""
        server = PeerServer("127.0.0.1", 0, secret, shelf or ReplicaShelf([self.followed()]), tls)
        self._closing.append(server.close)
        self.tells(f"{server.scheme}://127.0.0.1:{server.port}")
        return server

    def tells(self, address: str, host: str = "b", version: int = 2, in_sync: bool = True) -> None:
        """Publish a host's record."""
        replica = StandbyReplica(KEY, version, in_sync=in_sync)
        record = MemberRecord(host, replicas=(replica,), addresses={ADDRESS_KIND: address})
        Membership(self.root, host, 10.0).heartbeat(record)

    # -- host a -------------------------------------------------------------------------------------

    def task(
        self,
        secret: PeerSecret = SECRET,
        ca: bytes | None = None,
        store: LocalStore | None = None,
        answer_s_max: float = WAIT_S,
    ) -> Bucket:
        """Return the bucket in a call on host a, whose process does not know peers yet."""
        self.peers = Peers(self.root, PeerSettings(secret, ca, answer_s_max), "a", self.clock)
        self._closing.append(self.peers.close)
        return self.call(store)

    def call(self, store: LocalStore | None = None) -> Bucket:
        """Return the bucket in another call of that process."""
        if store is None:
            self.store = store = LocalStore.at(self.base / "a", SCHEMA)
            self._closing.append(store.close)
        return bucket_on(store, self.remote, self.base, later=self.later, peers=self.peers)

    def look_up(self, bucket: Bucket, keys: list[int]) -> int:
        """Look up keys, check the result, and return the number of requests that the remote store got."""
        before = self.remote.folder.requests
        states = bucket.read(lambda view: looked_up(view, keys, self.remote))
        assert states == {key: values_of(key) for key in keys if key < len(self.remote.keys)}
        return self.remote.folder.requests - before

    def given_bytes(self) -> int:
        """Return the number of bytes that peers have given to host a."""
        assert self.peers is not None
        return self.peers.given_bytes


def service_of(world: PeerWorld, *arguments: str) -> subprocess.Popen[str]:
    """Start the service of host b as a process, whose first line of output is still unread."""
    command = [sys.executable, "-m", "spark_state_ext", "standby", "run", world.root.root]
    options = ["--local-dir", str(world.base / "b"), "--peer-listen", "127.0.0.1:0", "--peer-address", "127.0.0.1"]
    return subprocess.Popen(
        [*command, *options, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SPARK_STATE_EXT_HOST": "b", "SPARK_STATE_EXT_PEER_SECRET": SECRET_TEXT},
        cwd=ROOT,
    )


def certified(name: str = "127.0.0.1") -> Tls:
    """Return a self-signed certificate and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(name))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Tls(certificate.public_bytes(serialization.Encoding.PEM), private)
