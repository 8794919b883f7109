"""Arguments and options of commands. Each is defined once, so that it means the same everywhere."""

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
    "make_json_option",
]


def _check_json_object(text: str | None) -> str | None:
    """Check that a text is a JSON object, and return the text unchanged."""
    if text is not None:
        _parse_options(text)
    return text


def _parse_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"it is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise typer.BadParameter('it is not a JSON object, such as {"anon": true}')
    return options


def make_json_option(owner: str, *names: str) -> Any:
    """Return an option that takes JSON like ``--storage-options``, for something else."""
    return typer.Option(
        *names, metavar="JSON", callback=_check_json_object, help=f"like --storage-options, for {owner}"
    )


# -- paths ----------------------------------------------------------------------------------------

StatePath = Annotated[
    str, typer.Argument(metavar="PATH", help="a root, a query folder or a savepoint: a path or a URL")
]
QueryPath = Annotated[str, typer.Argument(metavar="PATH", help="a root or a query folder: a path or a URL")]
RootPath = Annotated[
    str, typer.Argument(metavar="ROOT", help="the root that ArrowState has: an absolute path or a URL")
]
SavepointPath = Annotated[str, typer.Argument(metavar="PATH", help="the savepoint's folder: a path or a URL")]
NewSavepointPath = Annotated[
    str, typer.Argument(metavar="TARGET", help="folder of the new savepoint; must not exist yet")
]
MetricsPath = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="folder of the job's metrics; folders below it are read too")
]

# -- which state ----------------------------------------------------------------------------------

AtOption = Annotated[
    int | None,
    typer.Option(
        "--at", metavar="BATCH", help="read the state after this batch; by default the newest known to be committed"
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="LOCATION",
        help="the query's checkpointLocation: read the last committed batch, which Spark (4.0 or newer) knows",
    ),
]
OperatorOption = Annotated[
    str | None, typer.Option("--operator", metavar="NAME", help="which operator, if there are several")
]
QueryFolderOption = Annotated[
    str | None,
    typer.Option(
        "--query-folder", metavar="NAME", help="which query folder, if there are several; by default the newest"
    ),
]
UnprovenOption = Annotated[
    bool, typer.Option("--unproven", help="read also batches that may not be committed, with a warning on stderr")
]
HoldOption = Annotated[
    bool, typer.Option("--hold/--no-hold", help="stop clean-up while reading, by a small file in the query folder")
]
BucketsOption = Annotated[
    list[int] | None, typer.Option("--bucket", metavar="N", help="only this bucket; may be given several times")
]
LimitOption = Annotated[int | None, typer.Option("--limit", min=0, metavar="N", help="print at most N rows")]
RetainedOption = Annotated[
    int, typer.Option("--retained", min=1, metavar="N", help="Spark's spark.sql.streaming.minBatchesToRetain")
]
RootsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--root", help="root of an ArrowState whose queries may have started from it; may be given several times"
    ),
]

# -- keys to erase --------------------------------------------------------------------------------

KeyWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY]...", help="one or more keys: for each key a word for each key column"),
]
JsonKeys = Annotated[
    list[str] | None, typer.Option("--json", metavar="JSON", help="a key as a JSON object, which may contain nulls")
]
BackendsOption = Annotated[
    list[str] | None, typer.Option("--backend", metavar="ROOT", help="root of another backend of the query")
]
BackendOptions = Annotated[dict[str, Any], make_json_option("backends", "--backend-options")]
LocalDirsOption = Annotated[
    list[str] | None, typer.Option("--local-dir", metavar="FOLDER", help="local_dir of the ArrowState on this machine")
]
SavepointsOption = Annotated[
    list[str] | None, typer.Option("--savepoint", metavar="FOLDER", help="a savepoint to search")
]

# -- how ------------------------------------------------------------------------------------------

AllFilesOption = Annotated[bool, typer.Option("--all", help="list undamaged files too")]
IdleOption = Annotated[float, typer.Option("--idle-s", help="refuse if anything was written within so many seconds")]
JobDirOption = Annotated[
    Path | None,
    typer.Option("--local-dir", help="local_dir of the ArrowState; by default the system's temporary folder"),
]
ScratchOption = Annotated[
    str | None, typer.Option("--local-dir", help="local folder for large files from object stores")
]
StorageOptions = Annotated[
    dict[str, Any],
    typer.Option(
        "--storage-options", metavar="JSON", callback=_check_json_object, help="options for fsspec's file system"
    ),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="format of the printed data; arrow is an IPC stream", show_default=True)
]

# -- adapting commands to Typer -------------------------------------------------------------------

# The names of options whose values may be secrets end so.
_SUFFIX = "_options"


def adapt_to_typer(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose parameters Typer can handle.

    A dataclass parameter becomes one parameter for each of its fields. The JSON of ``--storage-options`` and of similar
    options is parsed. It may also come from a file (``--storage-options-file``) or an environment variable
    (``SPARK_STATE_EXT_STORAGE_OPTIONS``), because command lines are visible in process lists and shell histories. An
    option on the command line overrides the variable; giving an option together with its file is an error.
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
        parameter.name: "{}" if parameter.default is parameter.empty else parameter.default
        for parameter in parameters
        if parameter.name.endswith(_SUFFIX)
    }

    @wraps(command)
    def run(**values: Any) -> None:
        for name, default in defaults.items():
            path, text = values.pop(f"{name}_file"), values[name]
            if path is not None:
                text = _read_options_file(path, name, twice=text not in (default, os.environ.get(_variable_name(name))))
            values[name] = None if text is None else _parse_options(text)
        for name, choice in choices.items():
            values[name] = choice(**{field: values.pop(field) for field in inspect.signature(choice).parameters})
        command(**values)

    adapted: Any = run
    typer_parameters = [each for parameter in parameters for each in _add_file_option(parameter, defaults)]
    adapted.__signature__ = inspect.Signature(
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in typer_parameters]
    )
    adapted.__annotations__ = {parameter.name: parameter.annotation for parameter in typer_parameters}
    return run


def _add_file_option(parameter: inspect.Parameter, defaults: dict[str, str | None]) -> list[inspect.Parameter]:
    """Return a parameter for Typer; one that takes JSON becomes text, followed by the option for a file with it."""
    name = parameter.name
    if name not in defaults:
        return [parameter]
    info = copy.copy(get_args(parameter.annotation)[1])
    info.envvar = _variable_name(name)
    kind = str if defaults[name] is not None else str | None
    file = Annotated[Path | None, typer.Option(_file_flag(name), metavar="FILE", help="a file that contains this JSON")]
    return [
        parameter.replace(annotation=Annotated[kind, info], default=defaults[name]),
        inspect.Parameter(f"{name}_file", parameter.kind, default=None, annotation=file),
    ]


def _file_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}-file"


def _variable_name(name: str) -> str:
    return f"SPARK_STATE_EXT_{name.upper()}"


def _read_options_file(path: Path, name: str, *, twice: bool) -> str:
    if twice:
        raise typer.BadParameter(f"give {_file_flag(name)} or {_file_flag(name).removesuffix('-file')}, not both")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{_file_flag(name)} {path} cannot be read: {error}") from error
    try:
        _parse_options(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{_file_flag(name)} {path}: {error.message}") from error
    return text
