"""Arguments and options that several commands have."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from spark_state_ext.cli.output import Output

__all__ = ["OutputOption", "StorageOptions", "json_object", "options_for", "options_of"]


def json_object(text: str) -> str:
    """A JSON object, as it was given.

    Raises
    ------
    typer.BadParameter
        When it is none.
    """
    options_of(text)
    return text


def options_of(text: str) -> dict[str, Any]:
    """The options in a JSON object.

    Raises
    ------
    typer.BadParameter
        When it is none.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f'it is no JSON object, such as {{"anon": true}}: {text}')
    return found


def options_for(whose: str, *names: str) -> Any:
    """An option as ``--storage-options``, of something else.

    Parameters
    ----------
    whose
        Of what, for the help.
    *names
        Its names; by default that of the parameter.
    """
    return typer.Option(*names, metavar="JSON", callback=json_object, help=f"as --storage-options, of {whose}")


StorageOptions = Annotated[
    str,
    typer.Option("--storage-options", metavar="JSON", callback=json_object, help="of fsspec's file system"),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="how data is printed; arrow is an IPC stream", show_default=True)
]
