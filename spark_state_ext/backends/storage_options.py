"""Misspelt storage options, found where the job is planned.

Most file systems of fsspec take any option, and pass over one that they do not know, or complain when an executor first
connects. So what a user gave is compared with what the constructors name. An option that none of them names may be
legitimate, as many hand it on to another library: it is refused only where it looks like one that is named, or where it
is known that nothing else is taken.
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

# How alike two names must be for one to be taken for the other: "anno" for "anon" is 0.75, "hostname" for "host" 0.67.
_ALIKE = 0.75
# What fsspec itself takes, for every file system; no constructor names it.
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
# What fsspec takes out before it makes a file system, and what it puts in for one that lies on another.
_PASSED_OVER = frozenset({"compression", "encoding", "errors", "expand", "mode", "name_function", "newline", "num"})
_CHAINED = frozenset({"add_aliases", "add_docs", "fo", "fs", "target_options", "target_protocol"})
# To whom s3fs hands on: whatever else it was given, and two options that are mappings themselves.
_S3 = "s3fs.core.S3FileSystem"
_S3_SESSION = "aiobotocore.session.AioSession"
_S3_CLIENT = "botocore.session.Session.create_client"
_S3_CONFIG = "botocore.config.Config.OPTION_DEFAULTS"


def refuse_misspelt(root: str, options: Mapping[str, Any]) -> None:
    """Raise a UsageError for storage options that the file system of a root cannot take."""
    given = set(options) - {"implementation"}
    if not given or "::" in root:
        return
    made = _class_of(root, options.get("implementation"))
    if made is None:  # whoever makes the folder says why
        return
    name = f"{made.__module__}.{made.__qualname__}"
    named, open_ended = _named(made)
    is_s3 = name == _S3
    if is_s3:
        named |= _parameters(_S3_SESSION)
        # A session that the user made is not made of options; who hands one in knows what else may be.
        open_ended = "session" in options
    _refuse(root, made, "storage_options", given - _PASSED_OVER - _CHAINED, named, open_ended)
    if is_s3:
        for nested, taken in (("client_kwargs", _parameters(_S3_CLIENT)), ("config_kwargs", _defaults(_S3_CONFIG))):
            inner = options.get(nested)
            if taken and isinstance(inner, Mapping):
                _refuse(root, made, f"storage_options[{nested!r}]", set(inner), taken, open_ended=True)


def _refuse(root: str, made: type, where: str, given: Iterable[Any], named: frozenset[str], open_ended: bool) -> None:
    known = named | (_COMMON if where == "storage_options" else frozenset())
    for option in sorted(set(given) - known, key=str):
        alike = difflib.get_close_matches(str(option), sorted(known), n=1, cutoff=_ALIKE)
        if not alike and open_ended and isinstance(option, str):
            continue
        meant = f"most likely {alike[0]!r} is meant. " if alike else ""
        raise UsageError(
            f"{where} of the root {root!r} has the option {option!r}, which {made.__name__} does not take: {meant}"
            f"It takes {', '.join(sorted(named))}"
        )


def _class_of(root: str, implementation: Any) -> Any:
    """The class of a root's file system; None where there is none."""
    try:
        if implementation is not None:
            return _found(str(implementation))
        return fsspec.get_filesystem_class(get_protocol(root))
    except (ImportError, ValueError, AttributeError):
        return None


@functools.cache
def _named(made: type) -> tuple[frozenset[str], bool]:
    """The options that a class's constructors name, and whether they take others too."""
    named: set[str] = set()
    for base in made.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]  # of a class
        named |= {it.name for it in parameters if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)}
        if not any(it.kind is it.VAR_KEYWORD for it in parameters):
            return frozenset(named), False
    return frozenset(named), True


def _found(dotted: str) -> Any:
    """A class, or what is in one, by its dotted name."""
    names = dotted.split(".")
    for at in range(len(names) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:at]))
        except ModuleNotFoundError:
            continue
        for name in names[at:]:
            found = getattr(found, name)
        return found
    raise ImportError(f"there is no {dotted!r}")


def _parameters(dotted: str) -> frozenset[str]:
    """Names of a callable's parameters; none where another release of its library does not have it."""
    try:
        return frozenset(inspect.signature(_found(dotted)).parameters) - {"self", "args", "kwargs"}
    except (ImportError, AttributeError, ValueError, TypeError):
        return frozenset()


def _defaults(dotted: str) -> frozenset[str]:
    try:
        return frozenset(_found(dotted))
    except (ImportError, AttributeError, TypeError):
        return frozenset()
