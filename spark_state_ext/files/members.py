"""Names of the records of members (hosts with a standby service), and their folder below a root."""

from __future__ import annotations

import re
from typing import NamedTuple

from spark_state_ext.errors import UsageError

__all__ = ["MEMBERS_FOLDER", "STANDBY_FOLDER", "RecordName"]

STANDBY_FOLDER = "_standby"
MEMBERS_FOLDER = "members"
_NAME = re.compile(r"([A-Za-z0-9_=-][A-Za-z0-9._=-]*)\.(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})\.json")
_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-_")
_ESCAPE = re.compile(r"=([0-9A-F]{2})")
# File systems allow 255 bytes, and a temporary name is 38 bytes longer.
_HOST_MAX = 150


class RecordName(NamedTuple):
    """Name of a record's file."""

    host: str
    heartbeat: int
    generation: int

    @property
    def text(self) -> str:
        """The file name."""
        data = self.host.encode("utf-8", "surrogatepass")
        escaped_host = "".join(
            chr(byte) if byte in _SAFE and (at or byte != ord(".")) else f"={byte:02X}" for at, byte in enumerate(data)
        )
        if not 0 < len(escaped_host) <= _HOST_MAX:
            raise UsageError(
                f"a host's name must have 1 to {_HOST_MAX} bytes, unlike {self.host[:40]!r}: set SPARK_STATE_EXT_HOST, "
                "to the same name for the host's executors and its standby service"
            )
        return f"{escaped_host}.{self.heartbeat}.{self.generation}.json"

    @staticmethod
    def parse(text: str) -> RecordName | None:
        """Read a name that `text` made; None for any other name."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        host = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), match[1]).encode("latin-1")
        try:
            name = RecordName(host.decode("utf-8", "surrogatepass"), int(match[2]), int(match[3]))
            return name if name.text == text else None
        except (UnicodeDecodeError, UsageError):
            return None
