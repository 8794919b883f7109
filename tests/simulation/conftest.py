"""What every simulation is run with."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Damage, lost snapshots, holds that end and stores that do not answer are logged, thousands of times."""
    logger = logging.getLogger("spark_state_ext")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
