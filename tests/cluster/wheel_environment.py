"""A Python environment with the package from its wheel, as on a user's executors.

It uses the third-party packages of the tests' environment, so there are no downloads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.helpers.building import build

__all__ = ["build_wheel", "clean_environment", "make_environment"]

ROOT = Path(__file__).parents[2]
_PACKAGES = ("arrow_schemas", "spark_state_ext")
_FILES = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg", "setup.py")
_LEFT = shutil.ignore_patterns("__pycache__", "*.py[co]")


def clean_environment() -> dict[str, str]:
    """Return this process's variables without those that lead Python or Spark to the source tree or to another Spark."""
    dropped = ("PYTHON", "PYSPARK_", "SPARK_", "PYTEST_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def run_command(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this tree from a copy, with the installed setuptools.

    Parameters
    ----------
    folder
        Folder for the copy and the wheel.

    Returns
    -------
    Path
        The wheel.
    """
    source = folder / "source"
    for name in _PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=_LEFT)
    for name in _FILES:
        shutil.copy(ROOT / name, source / name)
    return build("wheel", source, folder, clean_environment())


def make_environment(folder: Path) -> Path:
    """Make a virtual environment with the wheel of this tree.

    Parameters
    ----------
    folder
        Folder for the environment; made if absent.

    Returns
    -------
    Path
        The environment's Python.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel(folder)
    run_command([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], folder)
    python = folder / "venv" / "bin" / "python"
    site = Path(
        run_command([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    )
    # Python reads no .pth files in an added folder, so an editable install of the source tree is not included.
    others = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "third_party.pth").write_text("\n".join(others) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    # Install into the folder itself, so that an older copy of the package in the tests' environment stays unchanged.
    run_command([*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)], folder)
    return python
