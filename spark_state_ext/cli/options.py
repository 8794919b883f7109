"""Arguments and options of commands: each is defined once, so that it means one thing everywhere."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from spark_state_ext.cli.output import Output

__all__ = [
    "AllFilesOption",
    "AtOption",
    "BackendOptions",
    "BackendsOption",
    "BucketsOption",
    "CheckpointOption",
    "HoldOption",
    "IdleOption",
    "JobDirOption",
    "JsonKeys",
    "KeyWords",
    "LimitOption",
    "LocalDirsOption",
    "MetricsPath",
    "NewSavepointPath",
    "OperatorOption",
    "OutputOption",
    "QueryFolderOption",
    "QueryPath",
    "RetainedOption",
    "RootPath",
    "RootsOption",
    "SavepointPath",
    "SavepointsOption",
    "ScratchOption",
    "StatePath",
    "StorageOptions",
    "UnprovenOption",
    "adapt_to_typer",
    "options_of",
]


def _json_object(text: str | None) -> str | None:
    """Check a JSON object, and return it as it was given."""
    if text is not None:
        _options_in(text)
    return text


def _options_in(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"it is no JSON: {error}") from error
    if not isinstance(options, dict):
        raise typer.BadParameter('it is no JSON object, such as {"anon": true}')
    return options


def options_of(whose: str, *names: str) -> Any:
    """An option as ``--storage-options``, of something else."""
    return typer.Option(*names, metavar="JSON", callback=_json_object, help=f"as --storage-options, of {whose}")


# -- paths ----------------------------------------------------------------------------------------

StatePath = Annotated[
    str, typer.Argument(metavar="PATH", help="a root, a query folder or a savepoint: a path or a URL")
]
QueryPath = Annotated[str, typer.Argument(metavar="PATH", help="a root or a query folder: a path or a URL")]
RootPath = Annotated[str, typer.Argument(metavar="ROOT", help="as ArrowState has it: an absolute path or a URL")]
SavepointPath = Annotated[str, typer.Argument(metavar="PATH", help="the savepoint's folder: a path or a URL")]
NewSavepointPath = Annotated[
    str, typer.Argument(metavar="TARGET", help="folder of the new one, which does not exist yet")
]
MetricsPath = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="folder of the job's metrics; those in folders below count too")
]

# -- which state ----------------------------------------------------------------------------------

AtOption = Annotated[
    int | None,
    typer.Option("--at", metavar="BATCH", help="after which batch; by default the newest known to be committed"),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="LOCATION",
        help="the query's checkpointLocation: Spark (4.0 or newer) says what is committed, so the last batch is read",
    ),
]
OperatorOption = Annotated[str | None, typer.Option("--operator", metavar="NAME", help="where there are several")]
QueryFolderOption = Annotated[
    str | None, typer.Option("--query-folder", metavar="NAME", help="where there are several; by default the newest")
]
UnprovenOption = Annotated[
    bool, typer.Option("--unproven", help="also what files do not prove to be committed, with a word on stderr")
]
HoldOption = Annotated[
    bool, typer.Option("--hold/--no-hold", help="keep clean-up away meanwhile, which writes a small file there")
]
BucketsOption = Annotated[list[int] | None, typer.Option("--bucket", metavar="N", help="this bucket only")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=0, metavar="N", help="rows at most")]
RetainedOption = Annotated[
    int, typer.Option("--retained", min=1, metavar="N", help="Spark's spark.sql.streaming.minBatchesToRetain")
]
RootsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--root", help="root of an ArrowState whose queries may have been started from it; may be given several times"
    ),
]

# -- keys to erase --------------------------------------------------------------------------------

KeyWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY]...", help="keys, one after the other: of each a word for each key column"),
]
JsonKeys = Annotated[
    list[str] | None, typer.Option("--json", metavar="JSON", help="a key as an object, which may have nulls")
]
BackendsOption = Annotated[
    list[str] | None, typer.Option("--backend", metavar="ROOT", help="root of another backend of the query")
]
BackendOptions = Annotated[dict[str, Any], options_of("backends", "--backend-options")]
LocalDirsOption = Annotated[
    list[str] | None, typer.Option("--local-dir", metavar="FOLDER", help="local_dir of the ArrowState, on this machine")
]
SavepointsOption = Annotated[
    list[str] | None, typer.Option("--savepoint", metavar="FOLDER", help="a savepoint to look at")
]

# -- how ------------------------------------------------------------------------------------------

AllFilesOption = Annotated[bool, typer.Option("--all", help="list files that are whole, too")]
IdleOption = Annotated[float, typer.Option("--idle-s", help="refuse where anything was written this recently")]
JobDirOption = Annotated[
    Path | None,
    typer.Option("--local-dir", help="as given to ArrowState; by default the system's temporary folder"),
]
ScratchOption = Annotated[str | None, typer.Option("--local-dir", help="local folder for large files of object stores")]
StorageOptions = Annotated[
    dict[str, Any],
    typer.Option("--storage-options", metavar="JSON", callback=_json_object, help="of fsspec's file system"),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="how data is printed; arrow is an IPC stream", show_default=True)
]

# -- what Typer sees ------------------------------------------------------------------------------

# Options whose values may be secrets have such names.
_SUFFIX = "_options"


def adapt_to_typer(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose parameters are what Typer knows.

    A parameter that is a dataclass becomes one for each of its fields. The JSON of ``--storage-options`` and of each
    option like it is parsed, and may also come from a file (``--storage-options-file``) or from an environment variable
    (``SPARK_STATE_EXT_STORAGE_OPTIONS``), as what stands on a command line is in lists of processes and in the history
    of a shell. The command line comes before the variable, and takes only one of the two options.
    """
    choices: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            choices[parameter.name] = parameter.annotation
            parameters += inspect.signature(choices[parameter.name], eval_str=True).parameters.values()
        else:
            parameters.append(parameter)
    defaults = {
        it.name: "{}" if it.default is it.empty else it.default for it in parameters if it.name.endswith(_SUFFIX)
    }

    @wraps(command)
    def run(**given: Any) -> None:
        for name, default in defaults.items():
            path, text = given.pop(f"{name}_file"), given[name]
            if path is not None:
                text = _read(path, name, twice=text not in (default, os.environ.get(_variable(name))))
            given[name] = None if text is None else _options_in(text)
        for name, choice in choices.items():
            given[name] = choice(**{field: given.pop(field) for field in inspect.signature(choice).parameters})
        command(**given)

    made: Any = run
    seen = [it for parameter in parameters for it in _with_file(parameter, defaults)]
    made.__signature__ = inspect.Signature([it.replace(kind=inspect.Parameter.KEYWORD_ONLY) for it in seen])
    made.__annotations__ = {it.name: it.annotation for it in seen}
    return run


def _with_file(parameter: inspect.Parameter, defaults: dict[str, str | None]) -> list[inspect.Parameter]:
    """A parameter as Typer has it: JSON is text there, and is followed by the option that names a file with it."""
    name = parameter.name
    if name not in defaults:
        return [parameter]
    info = copy.copy(get_args(parameter.annotation)[1])
    info.envvar = _variable(name)
    kind = str if defaults[name] is not None else str | None
    file = Annotated[Path | None, typer.Option(_flag(name), metavar="FILE", help="a file with that JSON")]
    return [
        parameter.replace(annotation=Annotated[kind, info], default=defaults[name]),
        inspect.Parameter(f"{name}_file", parameter.kind, default=None, annotation=file),
    ]


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
        _options_in(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{_flag(name)} {path}: {error.message}") from error
    return text
