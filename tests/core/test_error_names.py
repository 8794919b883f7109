"""The tree of errors: one name for each, wherever it is defined, and survives pickling under it."""

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


def _all_errors(base: type[StateError] = StateError) -> Iterator[type[StateError]]:
    yield base
    for derived in base.__subclasses__():
        yield from _all_errors(derived)


def test_each_error_has_one_name() -> None:
    """Errors of the formats were `arrow_schemas.errors.…`, one of the local store had the name of an inner module."""
    for package in (arrow_schemas, spark_state_ext):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # PySpark 3.5 has no data sources in Python.
            if "__main__" not in module.name and (_HAS_DATA_SOURCES or not module.name.endswith(".source.datasource")):
                importlib.import_module(module.name)
    ours = {error for error in _all_errors() if error.__module__.split(".")[0] in ("arrow_schemas", "spark_state_ext")}
    assert {f"{error.__module__}.{error.__qualname__}" for error in ours} == {
        f"spark_state_ext.errors.{name}" for name in NAMES
    }
    for error in ours:
        assert getattr(errors, error.__name__) is error


@pytest.mark.parametrize("name", sorted(NAMES - {"MissingRunError"}))
def test_that_name_is_shown_and_pickled(name: str) -> None:
    error = getattr(errors, name)("what is wrong")
    assert (
        "".join(traceback.format_exception_only(type(error), error))
        == f"spark_state_ext.errors.{name}: what is wrong\n"
    )
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "what is wrong"
