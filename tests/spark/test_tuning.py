"""`enable(…, tune=True)`: the settings that it changes and reports, and that `disable` restores."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from streams import read, write_batches

from spark_state_ext import ArrowState, disable, enable
from spark_state_ext.spark.client import tuning
from spark_state_ext.spark.compat import SPARK_VERSION
from tests.helpers.waiting import WAIT_S

LIMIT = "spark.sql.execution.arrow.maxBytesPerBatch"
NONE = str(2**31 - 1)


@pytest.fixture
def tunable(session: Any) -> Any:
    """Each kind of session, if this release of Spark has the setting."""
    if not session.conf.isModifiable(LIMIT):
        assert SPARK_VERSION < (4, 1)
        pytest.skip(f"this PySpark has no {LIMIT}")
    return session


def test_a_setting_that_spark_does_not_have_is_not_set(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SETTINGS", {"spark.sql.execution.arrow.noSuchSetting": "1"})
    try:
        assert enable(session, arrow_state(tmp_path), tune=True) == {}
    finally:
        disable(session)


def arrow_state(folder: Path) -> ArrowState:
    return ArrowState(str(folder / "root"), "tuned", buckets=2, local_dir=str(folder / "local"))


def test_a_changed_setting_is_returned_logged_and_restored_by_disable(
    tunable: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = tunable.conf.get(LIMIT)
    assert before != NONE
    caplog.set_level(logging.INFO, "spark_state_ext")
    try:
        assert enable(tunable, arrow_state(tmp_path), tune=True) == {LIMIT: (before, NONE)}
        assert f"{LIMIT} is now {NONE} for all queries of this session; it was {before}" in caplog.text
        assert tunable.conf.get(LIMIT) == NONE
        # Without `tune`, no setting is changed, and none is restored.
        assert enable(tunable, arrow_state(tmp_path)) == {}
        assert tunable.conf.get(LIMIT) == NONE
    finally:
        disable(tunable)
    assert tunable.conf.get(LIMIT) == before
    assert LIMIT not in dict(tunable.conf.getAll)


def test_no_setting_is_changed_without_tune(tunable: Any, tmp_path: Path) -> None:
    before = dict(tunable.conf.getAll)
    try:
        assert enable(tunable, arrow_state(tmp_path)) == {}
        assert dict(tunable.conf.getAll) == before
    finally:
        disable(tunable)


def test_a_value_that_the_user_has_set_before_is_kept(tunable: Any, tmp_path: Path) -> None:
    tunable.conf.set(LIMIT, "1234567")
    try:
        assert enable(tunable, arrow_state(tmp_path), tune=True) == {}
        assert tunable.conf.get(LIMIT) == "1234567"
        disable(tunable)
        assert tunable.conf.get(LIMIT) == "1234567"
    finally:
        disable(tunable)
        tunable.conf.unset(LIMIT)


def test_a_value_that_the_user_sets_later_is_kept_by_disable(tunable: Any, tmp_path: Path) -> None:
    try:
        enable(tunable, arrow_state(tmp_path), tune=True)
        tunable.conf.set(LIMIT, "1234567")
        disable(tunable)
        assert tunable.conf.get(LIMIT) == "1234567"
    finally:
        disable(tunable)
        tunable.conf.unset(LIMIT)


def test_a_query_continues_if_it_is_started_with_and_without_tuning(session: Any, tmp_path: Path) -> None:
    """The checkpoint of a query does not depend on tuning."""

    def count(key: Any, pdfs: Any, state: Any) -> Any:
        (n,) = state.getOption or (0,)
        n += sum(len(pdf) for pdf in pdfs)
        state.update((n,))
        return {"k": [key[0]], "n": [n]}

    batch = pa.table({"k": pa.array([1, 1, 2], pa.int64())})
    emitted: list[Any] = []
    for tune in (False, True, False):
        folder = write_batches(tmp_path / "in", [batch])
        try:
            enable(session, arrow_state(tmp_path), tune=tune)
            counts = (
                read(session, folder, "k long")
                .groupBy("k")
                .applyInPandasWithState(count, "k long, n long", "n long", "append", "NoTimeout")
            )
            writer = counts.writeStream.outputMode("append").format("parquet").option("path", str(tmp_path / "out"))
            writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
            query = writer.start()
            assert query.awaitTermination(WAIT_S)
        finally:
            disable(session)
        emitted.append(sorted((row.k, row.n) for row in session.read.parquet(str(tmp_path / "out")).collect()))
    assert emitted[-1] == [(1, 2), (1, 4), (1, 6), (2, 1), (2, 2), (2, 3)]
