"""The error classes: each has one name, wherever it is defined, and keeps it when it is pickled."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import pkgutil
import traceback
from collections.abc import Iterator

import pytest

import arrow_schemas
import spark_state_ext
from spark_state_ext import errors
from spark_state_ext.errors import StateError

NAMES = set(errors.__all__)
_HAS_DATA_SOURCES = importlib.util.find_spec("pyspark.sql.datasource") is not None


def _list_errors(base: type[StateError] = StateError) -> Iterator[type[StateError]]:
    yield base
    for derived in base.__subclasses__():
        yield from _list_errors(derived)


def test_each_error_class_is_named_after_the_errors_module_only() -> None:
    """Errors of the formats were once named `arrow_schemas.errors.…`, and one of the local store after its module."""
    for package in (arrow_schemas, spark_state_ext):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # PySpark 3.5 has no data sources in Python.
            if "__main__" not in module.name and (_HAS_DATA_SOURCES or not module.name.endswith(".source.datasource")):
                importlib.import_module(module.name)
    own = {error for error in _list_errors() if error.__module__.split(".")[0] in ("arrow_schemas", "spark_state_ext")}
    assert {f"{error.__module__}.{error.__qualname__}" for error in own} == {
        f"spark_state_ext.errors.{name}" for name in NAMES
    }
    for error in own:
        assert getattr(errors, error.__name__) is error


@pytest.mark.parametrize("name", sorted(NAMES - {"MissingRunError"}))
def test_tracebacks_and_pickles_use_the_name_of_the_error(name: str) -> None:
    error = getattr(errors, name)("what is wrong")
    assert (
        "".join(traceback.format_exception_only(type(error), error))
        == f"spark_state_ext.errors.{name}: what is wrong\n"
    )
    unpickled = pickle.loads(pickle.dumps(error))
    assert type(unpickled) is type(error)
    assert str(unpickled) == "what is wrong"
