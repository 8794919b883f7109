"""Fixture of all simulations."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Do not log: damage, lost snapshots, expired holds and failing stores would fill the log."""
    logger = logging.getLogger("spark_state_ext")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
