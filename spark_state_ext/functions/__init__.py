"""What a user's function over tables sees: `StateBatch`, its arguments and outcome, time to live."""

from __future__ import annotations
