"""Building the package, with what is installed: nothing is fetched for that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.waiting import WAIT_S

__all__ = ["build"]


def build(kind: str, source: Path, target: Path, environment: Mapping[str, str] | None = None) -> Path:
    """Build as pip does, with the setuptools that is installed.

    Parameters
    ----------
    kind
        ``"wheel"`` or ``"sdist"``.
    source, target
        The tree, and the folder for what is made of it.
    environment
        Variables of the process that builds; None: those of this one.

    Returns
    -------
    Path
        What was made.
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
