"""The built packages: a complete source distribution and a wheel from it, built without downloads."""

from __future__ import annotations

import email
import email.message
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from spark_state_ext.version import version_and_build
from tests.helpers.building import build

ROOT = Path(__file__).parent.parent
_PACKAGES = ("arrow_schemas", "spark_state_ext")
_WHOLE = (".ci", "benchmarks", "docs", "scripts", "tests", *_PACKAGES)
_FILES = (
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
)
# Files that test runs leave behind.
_LEFT = shutil.ignore_patterns("__pycache__", "*.py[co]", ".hypothesis")


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@dataclass(frozen=True)
class Built:
    """The built packages, and the names of their source files."""

    sources: set[str]
    sdist: Path
    wheel: Path

    @property
    def metadata(self) -> email.message.Message:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build a source distribution, unpack it, and build a wheel from it."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    for name in _WHOLE:
        shutil.copytree(ROOT / name, source / name, ignore=_LEFT)
    for name in _FILES:
        shutil.copy(ROOT / name, source / name)
    sources = list_files(source)
    archive = build("sdist", source, folder)
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "sdist")
    (sdist,) = (folder / "sdist").iterdir()
    return Built(sources, sdist, build("wheel", sdist, folder))


def test_the_source_distribution_has_all_files(built: Built) -> None:
    """It has the documents with their charts, the changelog, the benchmarks, and the tests with their data."""
    assert sorted(built.sources - list_files(built.sdist)) == []


def test_tests_run_from_the_source_distribution(built: Built) -> None:
    """All files of tests are there, as the test above shows; some that need only files of the distribution are run."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "tests/core/test_golden.py", "tests/test_figures.py"],
        cwd=built.sdist,
        env={**os.environ, "PYTHONPATH": str(built.sdist)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_wheel_has_only_the_packages(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = [archive.read(name).decode() for name in names if name.endswith("/entry_points.txt")]
    packages = {name for name in names if ".dist-info/" not in name}
    assert packages == {
        name for name in built.sources if name.startswith(tuple(f"{package}/" for package in _PACKAGES))
    }
    assert {f"{name}/py.typed" for name in _PACKAGES} <= packages
    assert any(name.endswith("/LICENSE") for name in names)
    assert "[spark_state_ext.backends]\nfsspec = " in entry_points


def test_the_wheel_has_the_version_and_build_of_this_tree(built: Built) -> None:
    """Executors with the wheel and a client in this tree must agree (`VersionSkewError`). A wheel is a zip file."""
    code = "from spark_state_ext import version; print(version.__file__, version.version_and_build())"
    environment = {**os.environ, "PYTHONPATH": str(built.wheel)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=built.wheel.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [f"{built.wheel}/spark_state_ext/version.py", version_and_build()], done.stderr


def test_the_description_for_an_index_has_no_relative_links(built: Built) -> None:
    """It has no pictures and no links to other files, which an index does not have; the code is unchanged."""
    description = built.metadata.get_payload()
    assert isinstance(description, str)
    assert built.metadata["Description-Content-Type"] == "text/markdown"
    blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert blocks.findall(description) == blocks.findall((ROOT / "README.md").read_text())
    prose = re.sub(r"`[^`\n]*`", "", blocks.sub("", description))
    assert [target for target in re.findall(r"\]\(([^)]*)\)", prose) if not target.startswith("https://")] == []
    assert "![" not in prose
    assert "<img" not in prose
    # The targets of the links are named instead.
    assert "`docs/operating/README.md`" in description


def test_the_wheel_has_the_expected_requirements(built: Built) -> None:
    """The core does not require Spark; the extras require Spark with a supported pandas, and object stores' packages."""
    requirements: dict[str, set[str]] = {}
    for line in built.metadata.get_all("Requires-Dist", []):
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
        requirements.setdefault(extra[1] if extra else "", set()).add(requirement.strip().replace(" ", ""))
    names = {extra: {re.split(r"[<>=\[]", text)[0] for text in texts} for extra, texts in requirements.items()}
    assert names[""] == {"fsspec", "lmdb", "numpy", "pandas", "pyarrow", "tenacity"}
    assert "pandas<3" in requirements["spark"] & requirements["client"]
    assert names["spark"] == {"pandas", "pyspark"}
    assert names["client"] == {"pandas", "pyspark-client"}
    assert [names[extra] for extra in ("s3", "azure", "gcs")] == [{"s3fs"}, {"adlfs"}, {"gcsfs"}]
