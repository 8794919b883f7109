"""Coverage-guided fuzzing of one decoder: ``python tests/fuzz/fuzz.py pointer --seconds 60``.

It writes an input that fails to a file ``crash-…`` (or ``oom-…``, ``timeout-…``), and exits with a code other than 0.
``python tests/fuzz/fuzz.py pointer --replay FILE`` tries such a file again.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

import atheris  # noqa: E402

# Instrument only our own code: the packages that it imports were not written for instrumentation.
with atheris.instrument_imports(include=["arrow_schemas", "spark_state_ext"]):
    from fuzz_targets import PLANTED, TARGETS, Target

_LENGTH_MAX = 16 << 10
DEFAULT_CORPUS = Path(tempfile.gettempdir()) / "spark_state_ext-fuzz"


def fuzz(target: Target, seconds: int, runs: int, seed: int, corpus: Path, findings: Path) -> None:
    """Run a target for that many seconds (0: no limit) or runs (-1: no limit), and end the process."""
    corpus.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(target.seeds()):
        target.check(data)  # a seed that does not decode would be useless
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

    def mutate(data: bytes, length_max: int, seed: int) -> bytes:
        assert change is not None
        changed = change(
            data, random.Random(seed), lambda old: bytes(atheris.Mutate(old, min(length_max, 2 * len(old) + 8)))
        )
        return changed[:length_max]

    custom = {} if change is None else {"custom_mutator": mutate}
    atheris.Setup([sys.argv[0], *options, str(corpus)], target, **custom)
    atheris.Fuzz()


def fuzz_all(arguments: argparse.Namespace) -> int:
    """Fuzz every target in turn, each in its own fork, as libFuzzer ends its process; return the number of failures."""
    failures = 0
    for name, target in TARGETS.items():
        print(f"== {name}", file=sys.stderr, flush=True)
        pid = os.fork()
        if pid == 0:
            findings = arguments.findings / name
            findings.mkdir(parents=True, exist_ok=True)
            corpus = (arguments.corpus or DEFAULT_CORPUS) / name
            fuzz(target, arguments.seconds, arguments.runs, arguments.seed, corpus, findings)
        failures += os.waitpid(pid, 0)[1] != 0
    return failures


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=["all", *TARGETS, *PLANTED], help="all: every target in turn")
    parser.add_argument("--seconds", type=int, default=60, help="0: no limit")
    parser.add_argument("--runs", type=int, default=-1, help="number of inputs; -1: no limit")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers; 0: another seed each time")
    parser.add_argument(
        "--corpus",
        type=Path,
        help="folder that keeps interesting inputs for the next run; of all: one below it for each target",
    )
    parser.add_argument("--findings", type=Path, default=Path(), help="folder for inputs that fail")
    parser.add_argument("--replay", type=Path, help="only try the bytes of this file")
    arguments = parser.parse_args()
    if arguments.target == "all":
        sys.exit(fuzz_all(arguments))
    target = {**TARGETS, **PLANTED}[arguments.target]
    if arguments.replay:
        target(arguments.replay.read_bytes())
        return
    corpus = arguments.corpus or DEFAULT_CORPUS / arguments.target
    fuzz(target, arguments.seconds, arguments.runs, arguments.seed, corpus, arguments.findings)


if __name__ == "__main__":
    main()
