"""Histories for Hypothesis: any bytes are one."""

from __future__ import annotations

from hypothesis import strategies as st
from sim_parts import Config, History

# Long enough for snapshots to be leaned on, and shorter ones for what goes wrong early.
STEPS_MAX = 60
STEP_BYTES = 16


def histories() -> st.SearchStrategy[History]:
    """Configurations and up to `STEPS_MAX` steps."""
    configs = st.builds(
        Config,
        checkpoint_v2=st.booleans(),
        last_wins=st.booleans(),
        retained=st.integers(1, 3),
        adopts=st.booleans(),
        one_disk=st.booleans(),
        ends_calmly=st.booleans(),
    )
    step = st.binary(min_size=STEP_BYTES, max_size=STEP_BYTES)
    lengths = st.sampled_from([10, 20, 40, STEPS_MAX])
    steps = lengths.flatmap(lambda n: st.lists(step, min_size=n, max_size=n)).map(tuple)
    return st.builds(History, configs, steps)
