"""An environment for each peer, because the peers and this package need versions of packages that exclude each other.

Each environment is created once, by pip from PyPI, in the folder ``.peers/NAME``, and created again when its
requirements change. If it cannot be created, `PeerUnavailableError` says why, and the report leaves the peer out and
gives this reason.
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
# By name, the error of each environment that could not be created. An attempt takes minutes, so the other variants of a
# peer do not try again.
_FAILED: dict[str, str] = {}


class PeerUnavailableError(BenchmarkError):
    """A peer cannot be run on this machine; the message says why."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment that a peer is installed in.

    Parameters
    ----------
    name
        Name of its folder.
    requirements
        Pinned packages.
    pythons
        Minor versions of Python 3 for which its packages have wheels, the preferred one first.
    java
        Releases of Java that the peer runs on; empty if it needs no Java.
    """

    name: str
    requirements: tuple[str, ...]
    pythons: tuple[int, ...]
    java: tuple[int, ...] = ()

    def python(self, folder: Path = FOLDER) -> Path:
        """Return the interpreter of the environment; create the environment if it is missing or out of date.

        Parameters
        ----------
        folder
            Folder of all environments.

        Raises
        ------
        PeerUnavailableError
            If the environment cannot be created, now or earlier in this process, or if there is no suitable Java.
        """
        if self.name in _FAILED:
            raise PeerUnavailableError(_FAILED[self.name])
        try:
            return self._make(folder)
        except PeerUnavailableError as error:
            _FAILED[self.name] = str(error)
            raise

    def _make(self, folder: Path) -> Path:
        self._check_java()
        target = (folder / self.name).absolute()
        python = target / "bin" / "python"
        stamp = target / _STAMP
        # The stamp is written last, so an incomplete environment has none.
        if (
            stamp.exists()
            and json.loads(stamp.read_text()) == self._make_stamp()
            and _read_minor(str(python)) in self.pythons
        ):
            return python
        shutil.rmtree(target, ignore_errors=True)
        base = self._find_base()
        print(f"Creating {target}: {', '.join(self.requirements)}", file=sys.stderr, flush=True)
        # Debian's Python may come without ensurepip, so the pip of the running Python installs the packages.
        self._run([base, "-m", "venv", "--without-pip", str(target)])
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
        self._run([*pip, *self.requirements])
        stamp.write_text(json.dumps(self._make_stamp()) + "\n")
        return python

    def _make_stamp(self) -> dict[str, list[str]]:
        return {"requirements": list(self.requirements)}

    def _find_base(self) -> str:
        """Return an interpreter to create the environment with."""
        for minor in self.pythons:
            for candidate in _list_candidates(minor):
                if _read_minor(candidate) == minor:
                    return candidate
        versions = ", ".join(f"3.{minor}" for minor in self.pythons)
        raise PeerUnavailableError(
            f"{self.name} has packages for Python {versions}, and none of these versions is the running Python, on "
            "PATH, in /usr/bin or among pyenv's versions: install one of them"
        )

    def _check_java(self) -> None:
        if not self.java:
            return
        answer = java_version()
        match = re.search(r'version "(?:1\.)?(\d+)', answer) if answer else None
        if match is None or int(match[1]) not in self.java:
            releases = ", ".join(map(str, self.java))
            raise PeerUnavailableError(f"{self.name} runs on Java {releases}; here is {answer or 'none'}")

    def _run(self, command: list[str]) -> None:
        try:
            result = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=_INSTALL_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerUnavailableError(f"its environment could not be made: {error}") from error
        if result.returncode != 0:
            errors = [
                line for line in result.stdout.splitlines() if line.startswith("ERROR")
            ] or result.stdout.splitlines()
            raise PeerUnavailableError(
                f"its environment could not be made: {' '.join(command)} ended with exit code {result.returncode}: "
                f"{'; '.join(errors[-3:])}"
            )


def _read_minor(python: str) -> int | None:
    """Return the minor version of an interpreter, or None if it does not run."""
    try:
        answer = subprocess.run([python, "-c", _VERSION_PROBE], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return int(answer.stdout.strip().removeprefix("3."))


def _list_candidates(minor: int) -> Iterator[str]:
    """Iterate over the places where an interpreter of a minor version may be."""
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
        # apache-flink itself pins PyArrow and NumPy.
        Environment("flink", ("apache-flink==2.3.0", "pyarrow==16.1.0", "numpy==2.1.3"), (11, 12, 10), (17, 21, 11)),
        Environment("quix", ("quixstreams==3.28.1", "pyarrow==26.0.1", "numpy==2.4.6"), (11, 12, 13)),
    )
}
