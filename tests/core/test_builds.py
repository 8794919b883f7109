"""Different sources of one version are different builds; the same sources are one build, however they are installed."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spark_state_ext.engine.job import BUILD, refuse_other_release
from spark_state_ext.errors import VersionSkewError
from spark_state_ext.version import __version__, build_id
from tests.helpers.waiting import WAIT_S

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("arrow_schemas", "spark_state_ext")
_PRINT_BUILD_ID = "from spark_state_ext.version import build_id; print(build_id())"


def _run_in_process(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that imports the packages from a path instead of this tree."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else [sys.executable, "-c", code]
    return subprocess.run(
        command,
        env=environment,
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def _copy(folder: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def _zip(folder: Path, within: str = "") -> Path:
    """Write a zip as users make it for ``addPyFile``, including folders and files that are not Python code."""
    archive = folder.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
        for path in sorted(folder.rglob("*")):
            if "__pycache__" not in path.parts:
                writer.write(path, within + path.relative_to(folder).as_posix())
    return archive


def test_the_same_sources_have_the_same_build_id(tmp_path: Path) -> None:
    """This tree, a copy of its packages with compiled files, and a zip of the copy have the same build id."""
    copy = _copy(tmp_path / "copy")
    compiled = copy / "spark_state_ext" / "__pycache__" / "version.py"
    compiled.parent.mkdir()
    compiled.write_text("compiled files are ignored")
    for path in (copy, _zip(copy)):
        done = _run_in_process(_PRINT_BUILD_ID, path)
        assert done.stdout.strip() == build_id(), done.stderr
    assert f"{__version__}+{build_id()}" == BUILD


def test_other_sources_have_another_build_id(tmp_path: Path) -> None:
    """An added byte, an added module and a renamed module change the build id of a folder and of a zip."""
    copy = _copy(tmp_path / "copy")
    builds = [build_id()]
    changed, page = copy / "spark_state_ext" / "engine" / "bucket.py", copy / "spark_state_ext" / "reports" / "page.py"
    for change in (
        lambda: changed.write_text(changed.read_text() + "#"),
        (copy / "arrow_schemas" / "more.py").touch,
        lambda: page.rename(page.with_name("pages.py")),
    ):
        change()
        for path in (copy, _zip(copy)):
            builds.append(_run_in_process(_PRINT_BUILD_ID, path).stdout.strip())
    assert builds[1::2] == builds[2::2], "a zip is the same build as the folder that it was made from"
    assert len(set(builds)) == 4


def test_an_executor_with_another_build_refuses_the_plan(tmp_path: Path) -> None:
    """The executor has the client's version, but from other sources shipped by `addPyFile`. The error names both builds."""
    copy = _copy(tmp_path / "copy")
    (copy / "spark_state_ext" / "more.py").touch()
    archive = _zip(copy)
    code = "from spark_state_ext.engine.job import BUILD, refuse_other_release as refuse; print(BUILD); "
    done = _run_in_process(f"{code} refuse({{'package_version': {BUILD!r}}})", archive)
    version, _, there = done.stdout.strip().partition("+")
    assert version == __version__
    assert (
        f"VersionSkewError: the query was planned with spark_state_ext {__version__} (build {build_id()})"
        in done.stderr
    )
    assert f"this executor has {__version__} (build {there}) in {archive / 'spark_state_ext'}" in done.stderr
    assert "Install the same wheel (or ship the same files) on the client and on all executors, then" in done.stderr


def test_an_installation_without_sources_is_compared_by_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation of compiled files only has no build id; it is not refused for that reason."""
    copy = tmp_path / "copy"
    for name in ("arrow_schemas/__init__.py", "spark_state_ext/__init__.py", "spark_state_ext/version.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        py_compile.compile(str(ROOT / name), str(copy / f"{name}c"), doraise=True)
    code = "from spark_state_ext.version import build_id, version_and_build as both; print([build_id(), both()])"
    assert _run_in_process(code, copy).stdout.strip() == str(["", __version__])
    refuse_other_release({"package_version": __version__})
    monkeypatch.setattr("spark_state_ext.engine.job.BUILD", __version__)
    refuse_other_release({"package_version": f"{__version__}+0123456789ab"})
    with pytest.raises(VersionSkewError, match=rf"0\.0\.9 \(build ab\), and .* has {__version__} \(build unknown\) in"):
        refuse_other_release({"package_version": "0.0.9+ab"})


@pytest.mark.parametrize("planned_with", ["0.1.0", "0.2.0", "0.2.0+0123456789ab", f"{__version__}+0123456789ab"])
def test_another_version_or_build_is_refused(planned_with: str) -> None:
    """A release is compared like any other version: by its number, and by its build if both sides have one."""
    refuse_other_release({"package_version": BUILD})
    with pytest.raises(
        VersionSkewError, match=r"planned with spark_state_ext .* and this executor has .*Install the same"
    ):
        refuse_other_release({"package_version": planned_with})
