"""Finds misspelt storage options when the job is planned.

Most file systems of fsspec accept any option. They ignore unknown ones, or fail when an executor first connects.
Therefore the user's options are compared with the parameters of the file system's constructors. An option that is not
among them may still be valid, because many file systems pass it on to another library. It is refused only if it looks
like a known option, or if the file system is known to accept no others.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import fsspec
from fsspec.utils import get_protocol

from spark_state_ext.errors import UsageError

__all__ = ["refuse_misspelt"]

# How similar a name must be to count as a misspelling: "anno" and "anon" have 0.75, "hostname" and "host" 0.67.
_ALIKE = 0.75
# Options that fsspec itself takes for every file system; constructors do not name them.
_COMMON = frozenset(
    {
        "asynchronous",
        "batch_size",
        "listings_expiry_time",
        "loop",
        "max_paths",
        "protocol",
        "skip_instance_cache",
        "use_listings_cache",
    }
)
# Options that fsspec removes before it makes a file system, and options that it adds for chained file systems.
_REMOVED = frozenset({"compression", "encoding", "errors", "expand", "mode", "name_function", "newline", "num"})
_CHAINED = frozenset({"add_aliases", "add_docs", "fo", "fs", "target_options", "target_protocol"})
# s3fs passes unknown options to its session, and two options that are mappings to the client and its configuration.
_S3 = "s3fs.core.S3FileSystem"
_S3_SESSION = "aiobotocore.session.AioSession"
_S3_CLIENT = "botocore.session.Session.create_client"
_S3_CONFIG = "botocore.config.Config.OPTION_DEFAULTS"


def refuse_misspelt(root: str, options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for storage options that the file system of a root cannot take."""
    names = set(options) - {"implementation"}
    if not names or "::" in root:
        return
    file_system = _find_class(root, options.get("implementation"))
    if file_system is None:  # the error comes when the folder is made
        return
    name = f"{file_system.__module__}.{file_system.__qualname__}"
    parameters, open_ended = _list_options(file_system)
    is_s3 = name == _S3
    if is_s3:
        parameters |= _read_parameters(_S3_SESSION)
        # With a session of the user's own, s3fs does not pass options to a new session, and others may be valid.
        open_ended = "session" in options
    _refuse(root, file_system, "storage_options", names - _REMOVED - _CHAINED, parameters, open_ended)
    if is_s3:
        for nested, accepted in (
            ("client_kwargs", _read_parameters(_S3_CLIENT)),
            ("config_kwargs", _read_defaults(_S3_CONFIG)),
        ):
            inner = options.get(nested)
            if accepted and isinstance(inner, Mapping):
                _refuse(root, file_system, f"storage_options[{nested!r}]", set(inner), accepted, open_ended=True)


def _refuse(
    root: str, file_system: type, where: str, options: Iterable[Any], parameters: frozenset[str], open_ended: bool
) -> None:
    accepted = parameters | (_COMMON if where == "storage_options" else frozenset())
    for option in sorted(set(options) - accepted, key=str):
        alike = difflib.get_close_matches(str(option), sorted(accepted), n=1, cutoff=_ALIKE)
        if not alike and open_ended and isinstance(option, str):
            continue
        hint = f"; most likely {alike[0]!r} is meant" if alike else ""
        raise UsageError(
            f"{where} of the root {root!r} has the option {option!r}, which {file_system.__name__} does not take"
            f"{hint}. It takes {', '.join(sorted(parameters))}"
        )


def _find_class(root: str, implementation: Any) -> Any:
    """Return the class of a root's file system; None if it cannot be found."""
    try:
        if implementation is not None:
            return _import_dotted(str(implementation))
        return fsspec.get_filesystem_class(get_protocol(root))
    except (ImportError, ValueError, AttributeError):
        return None


@functools.cache
def _list_options(file_system: type) -> tuple[frozenset[str], bool]:
    """Return the parameters of a class's constructors, and True if the constructors take other options too."""
    names: set[str] = set()
    for base in file_system.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        signature = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]  # of a class
        names |= {
            parameter.name
            for parameter in signature
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature):
            return frozenset(names), False
    return frozenset(names), True


def _import_dotted(dotted: str) -> Any:
    """Import an object, such as a class or an attribute of a class, by its dotted name."""
    names = dotted.split(".")
    for at in range(len(names) - 1, 0, -1):
        try:
            target: Any = importlib.import_module(".".join(names[:at]))
        except ModuleNotFoundError:
            continue
        for name in names[at:]:
            target = getattr(target, name)
        return target
    raise ImportError(f"{dotted!r} cannot be imported")


def _read_parameters(dotted: str) -> frozenset[str]:
    """Return the names of a callable's parameters; empty if the installed release of its library does not have it."""
    try:
        return frozenset(inspect.signature(_import_dotted(dotted)).parameters) - {"self", "args", "kwargs"}
    except (ImportError, AttributeError, ValueError, TypeError):
        return frozenset()


def _read_defaults(dotted: str) -> frozenset[str]:
    try:
        return frozenset(_import_dotted(dotted))
    except (ImportError, AttributeError, TypeError):
        return frozenset()
