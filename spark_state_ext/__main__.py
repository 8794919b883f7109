"""``spark-state-ext``, or ``python -m spark_state_ext``: commands for queries and their state.

``check`` works without the packages of the extra ``cli``, as it is what tells which packages there are.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from spark_state_ext.cli.exits import REFUSED

__all__ = ["main"]

# Of the extra.
_NEEDED = ("typer", "rich")
# Commands and options that may start Spark, which may need pandas.
_WITH_SPARK = frozenset({"abandoned", "export-native", "gc", "import-native", "savepoint", "--checkpoint", "--spark"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code (`spark_state_ext.cli.exits`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        if arguments is None and any(word.partition("=")[0] in _WITH_SPARK for word in given):
            _quiet_spark()
        elif arguments is None:
            sys.meta_path.insert(0, _WithoutPandas())
        from spark_state_ext.cli.app import main as run

        return run(given)
    if not given or given[0] == "check":
        from spark_state_ext.cli.check import main as check

        return check(given[1:])
    print(
        f"spark-state-ext: EnvironmentSetupError: this needs {' and '.join(missing)}, which this Python does not have: "
        "pip install 'spark_state_ext[cli]'. (Without it, python -m spark_state_ext check tells what is installed.)",
        file=sys.stderr,
    )
    return REFUSED


def _quiet_spark() -> None:
    """Leave out what PySpark would print in this process, which is the command's own; shorten warnings to a line."""
    import logging
    import warnings

    from spark_state_ext.files.printable import printable

    class Lines(logging.Formatter):
        """The first line of each message: below it Spark's errors have what the JVM went through."""

        def format(self, record: logging.LogRecord) -> str:
            return printable(next(iter(record.getMessage().splitlines()), ""))

    warnings.simplefilter("ignore")
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    logging.getLogger("spark_state_ext").addHandler(handler)
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)


class _WithoutPandas:
    """PyArrow imports pandas with the first array that is made of Python's values, which takes longer than all else
    that a quick command does. This process is the command's own, and needs none."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("this command goes without pandas", name=name)


if __name__ == "__main__":
    sys.exit(main())
