"""An environment for each peer: their packages want versions that exclude each other, and ours.

Each is made once, from PyPI with pip, in a folder of its own (``.peers/NAME``), and made anew when its requirements
change. Where that is not possible, `PeerUnavailableError` says why, and the peer is left out with that reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import BenchmarkError, java_version

__all__ = ["ENVIRONMENTS", "FOLDER", "ROOT", "Environment", "PeerUnavailableError"]

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / ".peers"
_STAMP = "peer.json"
_INSTALL_TIMEOUT_S = 1800
_VERSION_PROBE = "import sys; print('%d.%d' % sys.version_info[:2])"
# Trying takes minutes, and what could not be made is not tried again for each way of a peer.
_FAILED: dict[str, str] = {}


class PeerUnavailableError(BenchmarkError):
    """A peer cannot be run on this machine; the text says why."""


@dataclass(frozen=True)
class Environment:
    """What a peer is installed in.

    Parameters
    ----------
    name
        Name of its folder.
    requirements
        Packages, pinned.
    pythons
        Minor versions of Python 3 that its packages have wheels for, the preferred first.
    java
        Releases of Java it runs on; none when it needs no Java.
    """

    name: str
    requirements: tuple[str, ...]
    pythons: tuple[int, ...]
    java: tuple[int, ...] = ()

    def python(self, folder: Path = FOLDER) -> Path:
        """Return its interpreter; makes it when it is not there or not as it should be.

        Parameters
        ----------
        folder
            Folder of all environments.

        Raises
        ------
        PeerUnavailableError
            When it cannot be made.
        """
        if self.name in _FAILED:
            raise PeerUnavailableError(_FAILED[self.name])
        try:
            return self._made(folder)
        except PeerUnavailableError as error:
            _FAILED[self.name] = str(error)
            raise

    def _made(self, folder: Path) -> Path:
        self._check_java()
        at = (folder / self.name).absolute()
        python = at / "bin" / "python"
        stamp = at / _STAMP
        # Written last: an environment that is half made has none.
        if stamp.exists() and json.loads(stamp.read_text()) == self._wanted() and _minor(str(python)) in self.pythons:
            return python
        shutil.rmtree(at, ignore_errors=True)
        base = self._base()
        print(f"Making {at}: {', '.join(self.requirements)}", file=sys.stderr, flush=True)
        # Without pip, which Debian's Python could not put there; this Python's own installs into it.
        self._run([base, "-m", "venv", "--without-pip", str(at)])
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
        self._run([*pip, *self.requirements])
        stamp.write_text(json.dumps(self._wanted()) + "\n")
        return python

    def _wanted(self) -> dict[str, list[str]]:
        return {"requirements": list(self.requirements)}

    def _base(self) -> str:
        """An interpreter to make it from."""
        for minor in self.pythons:
            for candidate in _candidates(minor):
                if _minor(candidate) == minor:
                    return candidate
        versions = ", ".join(f"3.{minor}" for minor in self.pythons)
        raise PeerUnavailableError(
            f"{self.name} has packages for Python {versions}, and none of these is this Python, on PATH, in /usr/bin "
            "or among pyenv's versions"
        )

    def _check_java(self) -> None:
        if not self.java:
            return
        told = java_version()
        found = re.search(r'version "(?:1\.)?(\d+)', told) if told else None
        if found is None or int(found[1]) not in self.java:
            releases = ", ".join(map(str, self.java))
            raise PeerUnavailableError(f"{self.name} runs on Java {releases}; here is {told or 'none'}")

    def _run(self, command: list[str]) -> None:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=_INSTALL_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerUnavailableError(f"its environment could not be made: {error}") from error
        if done.returncode != 0:
            errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")] or done.stdout.splitlines()
            raise PeerUnavailableError(
                f"its environment could not be made: {' '.join(command)} ended with exit code {done.returncode}: "
                f"{'; '.join(errors[-3:])}"
            )


def _minor(python: str) -> int | None:
    """The minor version of an interpreter; None when it does not run."""
    try:
        told = subprocess.run([python, "-c", _VERSION_PROBE], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return int(told.stdout.strip().removeprefix("3."))


def _candidates(minor: int) -> Iterator[str]:
    """Where an interpreter of a version may be."""
    name = f"python3.{minor}"
    if sys.version_info[1] == minor:
        yield sys.executable
    yield from filter(None, [shutil.which(name)])
    yield f"/usr/bin/{name}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from sorted((str(path) for path in pyenv.glob(f"3.{minor}.*/bin/python")), reverse=True)


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("bytewax", ("bytewax==0.21.1", "pyarrow==26.0.1", "numpy==2.4.6"), (11, 12)),
        # It pins PyArrow and NumPy itself.
        Environment("flink", ("apache-flink==2.3.0", "pyarrow==16.1.0", "numpy==2.1.3"), (11, 12, 10), (17, 21, 11)),
        Environment("quix", ("quixstreams==3.28.1", "pyarrow==26.0.1", "numpy==2.4.6"), (11, 12, 13)),
    )
}
