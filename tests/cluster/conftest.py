"""The cluster that this folder's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A standalone master and two workers."""
    from cluster import Cluster, unusable

    reason = unusable()
    if reason is not None:
        pytest.skip(f"no Spark cluster can run here: {reason}")
    with Cluster(tmp_path_factory.mktemp("cluster").resolve()) as made:
        yield made
