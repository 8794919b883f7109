"""Commands: ``python -m spark_state_ext``."""

from __future__ import annotations
