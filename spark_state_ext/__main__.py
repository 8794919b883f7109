"""``spark-state-ext``, or ``python -m spark_state_ext``: commands for queries and their state.

``check`` reports which packages are installed, so it works without the packages of the extra ``cli``.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from spark_state_ext.cli.exit_codes import REFUSED

__all__ = ["main"]

# Packages of the extra ``cli``.
_REQUIRED_PACKAGES = ("typer", "rich")
# Commands and options that may start Spark, which may import pandas.
_WITH_SPARK = frozenset({"abandoned", "export-native", "gc", "import-native", "savepoint", "--checkpoint", "--spark"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code (`spark_state_ext.cli.exit_codes`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    missing = [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        if arguments is None and any(word.partition("=")[0] in _WITH_SPARK for word in words):
            _silence_spark()
        elif arguments is None:
            sys.meta_path.insert(0, _PandasBlocker())
        from spark_state_ext.cli.app import main as run

        return run(words)
    if not words or words[0] == "check":
        from spark_state_ext.cli.check import main as check

        return check(words[1:])
    print(
        f"spark-state-ext: EnvironmentSetupError: this command needs {' and '.join(missing)}, which this Python does "
        "not have: pip install 'spark_state_ext[cli]'. (python -m spark_state_ext check works without it, and reports "
        "what is installed.)",
        file=sys.stderr,
    )
    return REFUSED


def _silence_spark() -> None:
    """Suppress what PySpark prints in this process, and shorten warnings of this package to one line."""
    import logging
    import warnings

    from spark_state_ext.files.printable import printable

    class FirstLineFormatter(logging.Formatter):
        """Format only the first line of a message: in Spark's errors the JVM's stack trace follows."""

        def format(self, record: logging.LogRecord) -> str:
            return printable(next(iter(record.getMessage().splitlines()), ""))

    warnings.simplefilter("ignore")
    handler = logging.StreamHandler()
    handler.setFormatter(FirstLineFormatter())
    logging.getLogger("spark_state_ext").addHandler(handler)
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)


class _PandasBlocker:
    """Import hook that hides pandas. PyArrow imports pandas when it first converts Python values to an array, which
    takes longer than everything else that a quick command does. Commands do not need pandas."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("this command does not use pandas", name=name)


if __name__ == "__main__":
    sys.exit(main())
