"""Arguments that the client refuses before it plans a query."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from spark_state_ext import ArrowState, enable
from spark_state_ext.errors import UsageError
from spark_state_ext.spark.client.columns import refuse_equal_names
from spark_state_ext.spark.client.tuning import tune


def make_struct(*names: str) -> StructType:
    return StructType([StructField(name, LongType()) for name in names])


@pytest.mark.parametrize("name", ["strict", "strict_output", "clean_up"])
@pytest.mark.parametrize("value", ["no", 1, None], ids=repr)
def test_a_flag_must_be_true_or_false(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{name} must be True or False, not {value!r}"):
        ArrowState(str(tmp_path), "tested", **{name: value})


def test_enable_refuses_arguments_of_a_wrong_type(tmp_path: Path) -> None:
    state = ArrowState(str(tmp_path), "tested")
    for session in (None, "x", ArrowState):
        with pytest.raises(UsageError, match=r"enable\(spark, state\) takes a Spark session and then an ArrowState"):
            enable(session, state)  # type: ignore[arg-type]  # not a session
    like_a_session: Any = SimpleNamespace(range=print, conf={})
    with pytest.raises(UsageError, match="tune must be True or False, not 'x'"):
        enable(like_a_session, state, tune="x")  # type: ignore[arg-type]  # not a bool


def test_columns_with_equal_names_are_refused() -> None:
    with pytest.raises(UsageError, match="two state columns have the same name, 'n': n, n; rename one of them"):
        refuse_equal_names(make_struct("n", "n"), "state", case_sensitive=True)
    with pytest.raises(
        UsageError, match=r"two state columns have the same name, 'n': n, k, N; .*spark.sql.caseSensitive"
    ):
        refuse_equal_names(make_struct("n", "k", "N"), "state", case_sensitive=False)
    refuse_equal_names(make_struct("n", "N"), "state", case_sensitive=True)


def test_restore_from_must_name_one_of_the_backends(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=rf"restore_from must be the name of one of the backends .{tmp_path}., not 'x'"
    ):
        ArrowState(str(tmp_path), "tested", restore_from="x")


def test_tune_changes_nothing_if_the_client_cannot_list_the_settings() -> None:
    """The Connect sessions of a PySpark 3.5 client on a newer server have no `getAll`."""

    class Conf(dict[str, str]):
        def isModifiable(self, name: str) -> bool:
            return True

        def set(self, name: str, value: str) -> None:
            self[name] = value

    session: Any = SimpleNamespace(conf=Conf())
    assert tune(session) == {}, "the user may have chosen any setting, so all of them stay"
