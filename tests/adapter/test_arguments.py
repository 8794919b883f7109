"""Arguments that are refused on the client, before there is a query."""

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


def _columns(*names: str) -> StructType:
    return StructType([StructField(name, LongType()) for name in names])


@pytest.mark.parametrize("name", ["strict", "strict_output", "clean_up"])
@pytest.mark.parametrize("value", ["no", 1, None], ids=repr)
def test_a_flag_is_true_or_false(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{name} must be True or False, not {value!r}"):
        ArrowState(str(tmp_path), "tested", **{name: value})


def test_enable_takes_a_session_and_a_flag(tmp_path: Path) -> None:
    state = ArrowState(str(tmp_path), "tested")
    for session in (None, "x", ArrowState):
        with pytest.raises(UsageError, match=r"enable\(spark, state\) takes a Spark session and then an ArrowState"):
            enable(session, state)  # type: ignore[arg-type]  # no session
    like_a_session: Any = SimpleNamespace(range=print, conf={})
    with pytest.raises(UsageError, match="tune must be True or False, not 'x'"):
        enable(like_a_session, state, tune="x")  # type: ignore[arg-type]  # no bool


def test_columns_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two state columns have the same name, 'n': n, n; rename one of them"):
        refuse_equal_names(_columns("n", "n"), "state", case_sensitive=True)
    with pytest.raises(
        UsageError, match=r"two state columns have the same name, 'n': n, k, N; .*spark.sql.caseSensitive"
    ):
        refuse_equal_names(_columns("n", "k", "N"), "state", case_sensitive=False)
    refuse_equal_names(_columns("n", "N"), "state", case_sensitive=True)


def test_restore_from_is_told_to_be_a_name_of_the_backends(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=rf"restore_from must be the name of one of the backends .{tmp_path}., not 'x'"
    ):
        ArrowState(str(tmp_path), "tested", restore_from="x")


def test_tuning_where_the_client_cannot_list_what_was_set() -> None:
    """A client of PySpark 3.5 at a newer server: its Connect sessions have no `getAll`."""

    class Conf(dict[str, str]):
        def isModifiable(self, name: str) -> bool:
            return True

        def set(self, name: str, value: str) -> None:
            self[name] = value

    session: Any = SimpleNamespace(conf=Conf())
    assert tune(session) == {}, "nobody knows what was chosen, and so all of it stays"
