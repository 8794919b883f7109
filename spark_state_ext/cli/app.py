"""The application: finds a command by its name, and turns what it raises into a line and an exit code.

Only the module of the noun that is called is imported, so that quick commands start quickly.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from spark_state_ext.cli.exits import BUG, DONE, INTERRUPTED, REFUSED, WRONG_CALL
from spark_state_ext.cli.options import as_typer_has_it
from spark_state_ext.cli.output import say
from spark_state_ext.files.printable import printable

__all__ = [
    "COMMANDS",
    "ERASE_COMMANDS",
    "GROUPS",
    "PROGRAM",
    "SAVEPOINT_COMMANDS",
    "STANDBY_COMMANDS",
    "application",
    "main",
]

PROGRAM = "spark-state-ext"
# Name, module, and what it does. In its module it is the function of that name.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "check": ("doctor", "what is installed, and whether this machine can run it (also without a command)"),
    "doctor": ("doctor", "what is wrong with a configuration, and what to change"),
    "metrics": ("metrics", "what each batch did, from the files that executors write"),
    "skew": ("metrics", "how evenly the load lies on buckets: rows, state and time of each, and what mends it"),
    "recommend": ("rescale", "how many buckets and shuffle partitions a job should have, and why"),
    "report": ("metrics", "write one page about a job, from its metrics and its root"),
    "rollback": ("rollback", "make an older batch the last one of a Spark checkpoint"),
    "show": ("state", "which state there is at a path, and which batches of it can be read"),
    "get": ("state", "the state of one key"),
    "scan": ("state", "keys with their state, all or those that a filter is true of"),
    "diff": ("state", "what differs between two states, key by key"),
    "verify": ("verify", "read every byte of state, and say which file is damaged"),
    "gc": ("bucket_files", "which files the next clean-up would delete, and why it keeps the rest"),
    "why": ("bucket_files", "what a file is, whose it is, and what keeps it"),
    "lineage": ("lineage", "how the checkpoints of a bucket were built upon each other, as text or as a picture"),
    "log": ("bucket_files", "versions, batches and sizes of a query's checkpoint files, by time"),
    "export": ("state", "write keys with their state to a Parquet or Arrow file"),
    "abandoned": ("abandoned", "list and remove state that no Spark checkpoint names"),
    "savepoint": ("savepoint", "what is known of a savepoint, and what can be done with it"),
    "rescale": ("rescale", "write a savepoint anew with more or fewer buckets, without Spark"),
    "erase": ("erase", "erase keys that you name, and look for what holds them"),
    "standby": ("standby", "keep copies of buckets' state on this host, and see how far copies are"),
    "import-native": ("native", "bring a stopped job on Spark's own operator to this package, with Spark"),
    "export-native": ("native", "write a savepoint's state for Spark's own transformWithState, with Spark"),
}
SAVEPOINT_COMMANDS: Mapping[str, tuple[str, str]] = {
    "status": ("savepoint", "what is in it, who was started from it, and whether it may be deleted"),
    "create": ("savepoint", "take one of a query, with Spark"),
    "verify": ("savepoint", "read every byte of it, and say which file is damaged"),
    "copy": ("savepoint", "copy what its manifest names"),
    "transform": ("transform", "a new one with other columns or fewer keys, without Spark"),
    "claim": ("savepoint", "keep queries from it, until it is released"),
    "release": ("savepoint", "free a claim whose query is gone for good"),
    "delete": ("savepoint", "delete what its manifest names, where it may go"),
}
ERASE_COMMANDS: Mapping[str, tuple[str, str]] = {
    "keys": ("erase", "ask a query to take keys out of its state, in its next batch"),
    "status": ("erase", "what has become of what was asked"),
    "scan": ("erase", "look for what holds keys, and say what could not be looked at"),
    "withdraw": ("erase", "take back what was asked: a request then names no key"),
    "history": ("erase", "erase keys from all checkpoint files of a stopped query"),
}
STANDBY_COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("standby_service", "the service of this host, until it is told to stop (also `standby ROOT…`)"),
    "status": ("standby", "which hosts live, how far their replicas are, and who can be taken away"),
    "settings": ("standby", "whether there are replicas, how many, and how often hosts tell of theirs"),
}
# Commands that are groups of others.
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "savepoint": SAVEPOINT_COMMANDS,
    "erase": ERASE_COMMANDS,
    "standby": STANDBY_COMMANDS,
}
# What a group does with what is none of its commands.
_DEFAULTS: Mapping[str, str] = {"standby": "run"}
# Packages that commands import when they need them, and the extra that has each.
_EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(("pyspark", "py4j"), "spark"),
    "matplotlib": "report",
    "prometheus_client": "standby",
}
# The class of all errors in a call. Releases of typer have it in different modules.
_WrongCall: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
_TYPER: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _LazyGroup(TyperGroup):
    """A group whose commands are imported when they are asked for."""

    known: Mapping[str, tuple[str, str]] = COMMANDS
    default: str | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.known)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # What is neither a path nor an option is a mistyped command, and is told as one.
        if self.default is not None and (args[0].startswith("-") or "/" in args[0]):
            args = [self.default, *args]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.known:
            return None
        if cmd_name in GROUPS and self.known is COMMANDS:
            return _group(cmd_name)
        app = typer.Typer(add_completion=False, **_TYPER)
        app.command(cmd_name)(as_typer_has_it(_function(self.known[cmd_name][0], cmd_name)))
        return get_command(app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, says) for name, (_, says) in self.known.items()])


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"spark_state_ext.cli.{module}"), name.replace("-", "_"))


def _group(name: str) -> Any:
    made = type(f"_{name.capitalize()}Group", (_LazyGroup,), {"known": GROUPS[name], "default": _DEFAULTS.get(name)})
    app = typer.Typer(name=name, cls=made, add_completion=False, **_TYPER)
    app.callback(help=f"{COMMANDS[name][1].capitalize()}.")(lambda: None)
    return get_command(app)


def _version(asked: bool) -> None:
    if asked:
        from spark_state_ext.version import version_and_build

        typer.echo(f"{PROGRAM} {version_and_build()}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="print the version and the build"
    ),
) -> None:
    """Look at the state of queries, and see to it: what is there, whether it is whole, and what may go."""
    if ctx.invoked_subcommand is None:
        _function("doctor", "check")()


def application() -> typer.Typer:
    """All commands."""
    app = typer.Typer(cls=_LazyGroup, invoke_without_command=True, **_TYPER)
    app.callback()(_root)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code (`spark_state_ext.cli.exits`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = get_command(application()).main(args=given, prog_name=PROGRAM, standalone_mode=False)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except typer.Abort:
        return INTERRUPTED
    except _WrongCall as error:
        # It repeats what the command line says, such as a name that a pattern of the shell stood for.
        error.message = printable(error.message)
        error.show()
        return WRONG_CALL
    except Exception as error:
        return _report(error, given)
    return code if isinstance(code, int) else DONE


def _report(error: Exception, given: Sequence[str]) -> int:
    """Print an error as one line, or with its traceback if it is a bug; give the exit code."""
    # Not before there is an error: it imports every format.
    from spark_state_ext.errors import StateError, UsageError

    error = _as_missing_extra(error) or error
    if not isinstance(error, StateError):
        for line in traceback.format_exc().splitlines():
            say(line)
        say(f"{_called(given)}: this is a bug of spark_state_ext: please report the lines above")
        return BUG
    say(f"{_called(given)}: {type(error).__name__}: {error}")
    return WRONG_CALL if isinstance(error, UsageError) else REFUSED


def _as_missing_extra(error: Exception) -> Exception | None:
    """Return what to install if a command failed because a package of an extra is not installed."""
    from spark_state_ext.errors import EnvironmentSetupError

    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in _EXTRAS or importlib.util.find_spec(name) is not None:
        return None
    return EnvironmentSetupError(
        f"this command needs {name}, which this Python ({sys.executable}) does not have: "
        f"pip install 'spark_state_ext[{_EXTRAS[name]}]'"
    )


def _called(given: Sequence[str]) -> str:
    """The command as it was called, without its arguments."""
    words = [PROGRAM]
    known: Mapping[str, Any] = COMMANDS
    for word in given:
        if word not in known:
            break
        words.append(word)
        known = GROUPS.get(word, {})
    return " ".join(words)
