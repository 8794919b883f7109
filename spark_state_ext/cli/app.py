"""The application: finds a command by its name, and turns an error into one printed line and an exit code.

Only the module of the called command is imported, so that quick commands start quickly.
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

from spark_state_ext.cli.exit_codes import BUG, DONE, INTERRUPTED, REFUSED, WRONG_CALL
from spark_state_ext.cli.options import adapt_to_typer
from spark_state_ext.cli.output import say
from spark_state_ext.files.printable import printable

__all__ = [
    "COMMANDS",
    "ERASE_COMMANDS",
    "GROUPS",
    "PROGRAM",
    "SAVEPOINT_COMMANDS",
    "STANDBY_COMMANDS",
    "build_application",
    "main",
]

PROGRAM = "spark-state-ext"
# Each command's module and one-line help, by its name. The module has a function of the same name.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "check": ("doctor", "report what is installed and whether this machine can run it (the default command)"),
    "doctor": ("doctor", "report what is wrong with a configuration, and what to change"),
    "metrics": ("metrics", "print what each batch did, from the files that executors write"),
    "skew": ("metrics", "print rows, state and time of each bucket, which bucket is too heavy, and what to do"),
    "recommend": ("rescale", "recommend how many buckets and shuffle partitions a job should have, and why"),
    "report": ("metrics", "write one page about a job, from its metrics and its root"),
    "rollback": ("rollback", "make an older batch the last one of a Spark checkpoint"),
    "show": ("state", "print which state is at a path, and which of its batches can be read"),
    "get": ("state", "print the state of one key"),
    "scan": ("state", "print keys with their state: all keys, or those that match a filter"),
    "diff": ("state", "print what differs between two states, key by key"),
    "verify": ("verify", "read every byte of state, and report which files are damaged"),
    "gc": ("bucket_files", "list the files that the next clean-up would delete, and why it keeps the rest"),
    "why": ("bucket_files", "explain what a file is, who owns it, and why it is kept"),
    "lineage": ("lineage", "show which checkpoints of a bucket build on which, as text or as a picture"),
    "log": ("bucket_files", "list versions, batches and sizes of a query's checkpoint files, by time"),
    "export": ("state", "write keys with their state to a Parquet or Arrow file"),
    "abandoned": ("abandoned", "list and remove state that no Spark checkpoint names"),
    "savepoint": ("savepoint", "inspect, create, copy, change and delete savepoints"),
    "rescale": ("rescale", "write a savepoint again with more or fewer buckets, without Spark"),
    "erase": ("erase", "erase keys, and find the files that hold them"),
    "standby": ("standby", "keep copies of buckets' state on this host, and show how up to date copies are"),
    "import-native": ("native", "bring a stopped job on Spark's own operator to this package, with Spark"),
    "export-native": ("native", "write a savepoint's state for Spark's own transformWithState, with Spark"),
}
SAVEPOINT_COMMANDS: Mapping[str, tuple[str, str]] = {
    "status": ("savepoint", "print its contents, the queries that started from it, and whether it may be deleted"),
    "create": ("savepoint", "take a savepoint of a query, with Spark"),
    "verify": ("savepoint", "read every byte of it, and report which files are damaged"),
    "copy": ("savepoint", "copy the files that its manifest names"),
    "transform": ("transform", "write a new savepoint with other columns or fewer keys, without Spark"),
    "claim": ("savepoint", "stop queries from using it until it is released"),
    "release": ("savepoint", "free a claim whose query is gone for good"),
    "delete": ("savepoint", "delete the files that its manifest names, if no query needs them"),
}
ERASE_COMMANDS: Mapping[str, tuple[str, str]] = {
    "keys": ("erase", "ask a query to remove keys from its state, in its next batch"),
    "status": ("erase", "print how far each request is"),
    "scan": ("erase", "find what holds keys, and report what could not be searched"),
    "withdraw": ("erase", "withdraw a request: the query erases no keys for it"),
    "history": ("erase", "erase keys from all checkpoint files of a stopped query"),
}
STANDBY_COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("standby_service", "run the service of this host until it is stopped (also `standby ROOT…`)"),
    "status": ("standby", "print which hosts are alive, their replicas' lag, and which hosts can be removed safely"),
    "settings": ("standby", "print or set whether there are replicas, how many, and how often hosts report"),
}
# Commands that are groups of subcommands.
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "savepoint": SAVEPOINT_COMMANDS,
    "erase": ERASE_COMMANDS,
    "standby": STANDBY_COMMANDS,
}
# The subcommand that a group runs when a path or an option follows the group's name.
_DEFAULT_COMMANDS: Mapping[str, str] = {"standby": "run"}
# Packages that commands import only when they need them, and the extra that installs each.
_EXTRA_OF_PACKAGE: Mapping[str, str] = {
    **dict.fromkeys(("pyspark", "py4j"), "spark"),
    "matplotlib": "report",
    "prometheus_client": "standby",
}
# The base class of typer's errors for a wrong call. Its module depends on typer's release.
_CallError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
_TYPER: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _LazyGroup(TyperGroup):
    """A group that imports a command only when it is called."""

    command_table: Mapping[str, tuple[str, str]] = COMMANDS
    default: str | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.command_table)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # A word that is neither a path nor an option is a mistyped command, and is reported as one.
        if self.default is not None and (args[0].startswith("-") or "/" in args[0]):
            args = [self.default, *args]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.command_table:
            return None
        if cmd_name in GROUPS and self.command_table is COMMANDS:
            return _build_group(cmd_name)
        app = typer.Typer(add_completion=False, **_TYPER)
        app.command(cmd_name)(adapt_to_typer(_import_command(self.command_table[cmd_name][0], cmd_name)))
        return get_command(app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.command_table.items()])


def _import_command(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"spark_state_ext.cli.{module}"), name.replace("-", "_"))


def _build_group(name: str) -> Any:
    group_class = type(
        f"_{name.capitalize()}Group",
        (_LazyGroup,),
        {"command_table": GROUPS[name], "default": _DEFAULT_COMMANDS.get(name)},
    )
    app = typer.Typer(name=name, cls=group_class, add_completion=False, **_TYPER)
    app.callback(help=f"{COMMANDS[name][1].capitalize()}.")(lambda: None)
    return get_command(app)


def _print_version(asked: bool) -> None:
    if asked:
        from spark_state_ext.version import version_and_build

        typer.echo(f"{PROGRAM} {version_and_build()}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="print the version and the build"
    ),
) -> None:
    """Inspect and maintain the state of queries: what is there, what is damaged, and what can be deleted."""
    if ctx.invoked_subcommand is None:
        _import_command("doctor", "check")()


def build_application() -> typer.Typer:
    """Return the Typer application with all commands."""
    app = typer.Typer(cls=_LazyGroup, invoke_without_command=True, **_TYPER)
    app.callback()(_root)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code (`spark_state_ext.cli.exit_codes`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = get_command(build_application()).main(args=words, prog_name=PROGRAM, standalone_mode=False)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except typer.Abort:
        return INTERRUPTED
    except _CallError as error:
        # The message quotes the command line, which may hold control characters, such as in an expanded file name.
        error.message = printable(error.message)
        error.show()
        return WRONG_CALL
    except Exception as error:
        return _report(error, words)
    return code if isinstance(code, int) else DONE


def _report(error: Exception, arguments: Sequence[str]) -> int:
    """Print an error as one line, or with its traceback if it is a bug; return the exit code."""
    # Imported only after an error, because it imports every format.
    from spark_state_ext.errors import StateError, UsageError

    error = _explain_missing_extra(error) or error
    if not isinstance(error, StateError):
        for line in traceback.format_exc().splitlines():
            say(line)
        say(f"{_command_name(arguments)}: this is a bug of spark_state_ext: please report the lines above")
        return BUG
    say(f"{_command_name(arguments)}: {type(error).__name__}: {error}")
    return WRONG_CALL if isinstance(error, UsageError) else REFUSED


def _explain_missing_extra(error: Exception) -> Exception | None:
    """Return an error that names the extra to install, if a package of an extra is missing; else None."""
    from spark_state_ext.errors import EnvironmentSetupError

    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in _EXTRA_OF_PACKAGE or importlib.util.find_spec(name) is not None:
        return None
    return EnvironmentSetupError(
        f"this command needs {name}, which this Python ({sys.executable}) does not have: "
        f"pip install 'spark_state_ext[{_EXTRA_OF_PACKAGE[name]}]'"
    )


def _command_name(arguments: Sequence[str]) -> str:
    """Return the program's name with the command and subcommand that were called, without arguments."""
    words = [PROGRAM]
    commands: Mapping[str, Any] = COMMANDS
    for word in arguments:
        if word not in commands:
            break
        words.append(word)
        commands = GROUPS.get(word, {})
    return " ".join(words)
