"""``python -m spark_state_ext``: what is installed here and whether it can run; and the commands for jobs that run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

__all__ = ["main"]

_COMMANDS = {
    "check": "what is installed, and whether this machine can run it (also without a command)",
    "metrics": "what each batch did, from the files that executors write",
    "rollback": "make an older batch the last one of a Spark checkpoint",
    "abandoned": "list and remove state that no Spark checkpoint names",
    "savepoint": "what is known of a savepoint, and whether it may be deleted",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status, or 2 where there is none of that name."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given.pop(0) if given else "check"
    if name in ("-h", "--help"):
        print("usage: python -m spark_state_ext [COMMAND …]\n")
        for known, says in _COMMANDS.items():
            print(f"  {known:10} {says}")
        print("\npython -m spark_state_ext COMMAND --help tells more.")
        return 0
    if name not in _COMMANDS:
        print(f"spark_state_ext: no command is called {name!r}; there are {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    command: Callable[[Sequence[str]], int] = importlib.import_module(f"spark_state_ext.cli.{name}").main
    return command(given)


if __name__ == "__main__":
    sys.exit(main())
