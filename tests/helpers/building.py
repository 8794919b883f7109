"""Building the package with the installed tools, without a download."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.waiting import WAIT_S

__all__ = ["build"]


def build(kind: str, source: Path, target: Path, environment: Mapping[str, str] | None = None) -> Path:
    """Build as pip does, with the installed setuptools.

    Parameters
    ----------
    kind
        ``"wheel"`` or ``"sdist"``.
    source, target
        The source tree, and the folder for the built file.
    environment
        Environment variables of the build; None for those of this process.

    Returns
    -------
    Path
        The built file.
    """
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target / done.stdout.splitlines()[-1]
