"""Arguments and options that several commands have."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from spark_state_ext.cli.output import Output

__all__ = ["OutputOption", "StorageOptions", "json_object", "options_for", "options_of", "with_option_files"]

# Options whose values may be secrets have such names.
_SUFFIX = "_options"


def json_object(text: str) -> str:
    """A JSON object, as it was given."""
    options_of(text)
    return text


def options_of(text: str) -> dict[str, Any]:
    """The options in a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter('it is no JSON object, such as {"anon": true}')
    return found


def options_for(whose: str, *names: str) -> Any:
    """An option as ``--storage-options``, of something else."""
    return typer.Option(*names, metavar="JSON", callback=json_object, help=f"as --storage-options, of {whose}")


StorageOptions = Annotated[
    str,
    typer.Option("--storage-options", metavar="JSON", callback=json_object, help="of fsspec's file system"),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="how data is printed; arrow is an IPC stream", show_default=True)
]


def with_option_files(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that also takes the JSON of its options from a file and from an environment variable.

    What stands on a command line is in lists of processes and in the history of a shell. ``--storage-options`` and each
    option like it gets a ``--storage-options-file`` and the variable ``SPARK_STATE_EXT_STORAGE_OPTIONS``. The command
    line comes before the variable, and takes only one of the two options.
    """
    signature = inspect.signature(command, eval_str=True)
    names = [name for name in signature.parameters if name.endswith(_SUFFIX)]
    if not names:
        return command

    @wraps(command)
    def run(**given: Any) -> None:
        for name in names:
            path = given.pop(f"{name}_file")
            if path is not None:
                elsewhere = (signature.parameters[name].default, os.environ.get(_variable(name)))
                given[name] = _read(path, name, twice=given[name] not in elsewhere)
        command(**given)

    parameters = []
    for name, parameter in signature.parameters.items():
        if name not in names:
            parameters.append(parameter)
            continue
        kind, info = get_args(parameter.annotation)
        info = copy.copy(info)
        info.envvar = _variable(name)
        parameters.append(parameter.replace(annotation=Annotated[kind, info]))
        file = Annotated[Path | None, typer.Option(_flag(name), metavar="FILE", help="a file with that JSON")]
        parameters.append(inspect.Parameter(f"{name}_file", parameter.kind, default=None, annotation=file))
    made: Any = run
    made.__signature__ = signature.replace(parameters=parameters)
    made.__annotations__ = {it.name: it.annotation for it in parameters}
    return run


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}-file"


def _variable(name: str) -> str:
    return f"SPARK_STATE_EXT_{name.upper()}"


def _read(path: Path, name: str, *, twice: bool) -> str:
    if twice:
        raise typer.BadParameter(f"give {_flag(name)} or {_flag(name).removesuffix('-file')}, not both")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{_flag(name)} {path} cannot be read: {error}") from error
    try:
        return json_object(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{_flag(name)} {path}: {error.message}") from error
