"""Commands: ``spark-state-ext``, or ``python -m spark_state_ext`` (`docs/operating/commands.md`)."""

from __future__ import annotations
