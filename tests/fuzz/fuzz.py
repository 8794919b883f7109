"""Coverage-guided fuzzing of one decoder: ``python tests/fuzz/fuzz.py pointer --seconds 60``.

What it finds is written to a file called ``crash-…`` (or ``oom-…``, ``timeout-…``), and the exit code is not 0. Such a
file is tried again with ``python tests/fuzz/fuzz.py pointer --replay FILE``.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

import atheris  # noqa: E402

# Coverage is that of our own code: what these packages import was not written to be instrumented.
with atheris.instrument_imports(include=["arrow_schemas", "spark_state_ext"]):
    from fuzz_targets import PLANTED, TARGETS, Target

_LENGTH_MAX = 16 << 10


def fuzz(target: Target, seconds: int, runs: int, seed: int, corpus: Path, findings: Path) -> None:
    """Run a target until the time is up, or it has run so often; 0 seconds and -1 runs have no end. Ends the process."""
    corpus.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(target.seeds()):
        target.check(data)  # a seed that does not decode would be of no use
        (corpus / f"seed-{i}").write_bytes(data)
    options = [
        f"-max_total_time={seconds}",
        f"-runs={runs}",
        f"-seed={seed}",
        f"-artifact_prefix={findings}/",
        f"-max_len={_LENGTH_MAX}",
        "-timeout=300",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
    ]
    change = target.change

    def mutator(data: bytes, length_max: int, seed: int) -> bytes:
        assert change is not None
        made = change(
            data, random.Random(seed), lambda old: bytes(atheris.Mutate(old, min(length_max, 2 * len(old) + 8)))
        )
        return made[:length_max]

    own = {} if change is None else {"custom_mutator": mutator}
    atheris.Setup([sys.argv[0], *options, str(corpus)], target, **own)
    atheris.Fuzz()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=["all", *TARGETS, *PLANTED], help="all: one after the other")
    parser.add_argument("--seconds", type=int, default=60, help="0: no end")
    parser.add_argument("--runs", type=int, default=-1, help="end after so many inputs; -1: no end")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers; 0: another one every time")
    parser.add_argument("--corpus", type=Path, help="folder that keeps what was interesting, for the next time")
    parser.add_argument("--findings", type=Path, default=Path(), help="folder for what was found")
    parser.add_argument("--replay", type=Path, help="only try the bytes of this file")
    arguments = parser.parse_args()
    if arguments.target == "all":
        # libFuzzer ends its process.
        for name in TARGETS:
            subprocess.run([sys.executable, __file__, name, *sys.argv[2:]], check=True)
        return
    target = {**TARGETS, **PLANTED}[arguments.target]
    if arguments.replay:
        target(arguments.replay.read_bytes())
        return
    corpus = arguments.corpus or Path(tempfile.gettempdir()) / "spark_state_ext-fuzz" / arguments.target
    fuzz(target, arguments.seconds, arguments.runs, arguments.seed, corpus, arguments.findings)


if __name__ == "__main__":
    main()
