"""Functions may start processes; a forked process must not change the state."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from jobs import CLASSIC, Job, keyed
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.state import GroupState

pytestmark = pytest.mark.spark

OUTPUT = "key string, n bigint"


def count_rows(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> pd.DataFrame:
    n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
    state.update((n,))
    return pd.DataFrame({"key": [key[0]], "n": [n]})


@CLASSIC
def test_a_function_may_fork_and_start_processes(session: Any, operator: str, tmp_path: Path) -> None:
    python = sys.executable

    def start_processes(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        frame = count_rows(key, pdfs, state)
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        helper = multiprocessing.get_context("fork").Process(target=sum, args=([1, 2],))
        helper.start()
        helper.join()
        assert helper.exitcode == 0
        subprocess.run([python, "-c", "1"], check=True)
        yield frame

    job = Job(session, operator, tmp_path, start_processes, OUTPUT)
    assert job.run(keyed("a", "b"), keyed("a"), keyed("a", "b")) == {
        0: [("a", 1), ("b", 1)],
        1: [("a", 2)],
        2: [("a", 3), ("b", 2)],
    }


@CLASSIC
@pytest.mark.parametrize("operator", ["arrow"])
def test_a_forked_child_that_returns_from_the_function_commits_nothing(
    session: Any, operator: str, tmp_path: Path
) -> None:
    def fork(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        frame = count_rows(key, pdfs, state)
        if broken:
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
        yield frame

    broken = True
    job = Job(session, operator, tmp_path, fork, OUTPUT)
    with pytest.raises(StreamingQueryException, match=r"ForkedProcessError: the local store .* os\._exit"):
        job.run(keyed("a"))
    broken = False
    assert job.run(keyed("b")) == {0: [("a", 1)], 1: [("b", 1)]}
