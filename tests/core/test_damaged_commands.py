"""Commands on damaged files: whatever lies there, each command ends with a documented exit code and a typed line.

A damage is a file of a small root or savepoint, and what becomes of it. Every command that only reads is run on each:
about sixty damages in the suite, 1,200 in the long form. Where a command says that all is well, it prints what it prints
of the whole files.
"""

from __future__ import annotations

import io
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_root import QUERY, savepoint_of, small_root

from spark_state_ext import errors
from spark_state_ext.__main__ import main
from spark_state_ext.savepoints.claims import SavepointClaim, claim_savepoint
from tests.helpers.soak import examples

_SEED = 20_240_201
_ROUNDS = 6
_DOCUMENTED = frozenset({0, 1, 2, 3})
_TYPED = re.compile(r"spark-state-ext [a-z ]+: (\w+): \S")
# Commands that read, on the root, its query folder, and the savepoint.
_COMMANDS: list[list[str]] = [
    ["show", "ROOT", "--no-hold"],
    ["get", "ROOT", "ann", "0", "--no-hold"],
    ["scan", "ROOT", "--no-hold", "-o", "arrow"],
    ["scan", "FOLDER", "--at", "3", "--no-hold", "--filter", "count > 10", "-o", "jsonl"],
    ["diff", "ROOT", "SAVEPOINT", "--no-hold", "-o", "json"],
    ["verify", "ROOT", "--all", "-o", "json"],
    ["gc", "FOLDER", "--dry-run", "--retained", "2"],
    ["why", "FILE"],
    ["lineage", "FOLDER", "--bucket", "0"],
    ["log", "FOLDER", "--files"],
    ["show", "SAVEPOINT"],
    ["get", "SAVEPOINT", "bob", "0.5"],
    ["scan", "SAVEPOINT", "-o", "jsonl"],
    ["savepoint", "status", "SAVEPOINT", "--root", "ROOT", "-o", "json"],
    ["savepoint", "verify", "SAVEPOINT"],
    ["abandoned", "ROOT", "-c", "CHECKPOINT"],
]
# Of these the output is that of the whole files where they exit with 0: they read all that they print.
_EXACT = frozenset({"get", "scan", "diff"})


@dataclass(frozen=True)
class Damage:
    """What became of a file."""

    path: Path
    how: str
    seed: int

    def __str__(self) -> str:
        return f"{self.how} (seed {self.seed}) of {self.path}"


def _flipped(data: bytes, others: list[Path], chance: random.Random) -> bytes:
    at = chance.randrange(max(1, len(data)))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def _other(data: bytes, others: list[Path], chance: random.Random) -> bytes:
    return chance.choice(others).read_bytes()


_WAYS: dict[str, Callable[[bytes, list[Path], random.Random], bytes]] = {
    "flip": _flipped,
    "truncate": lambda data, others, chance: data[: chance.randrange(len(data))],
    "extend": lambda data, others, chance: data + chance.randbytes(chance.randrange(1, 64)),
    "empty": lambda data, others, chance: b"",
    "garbage": lambda data, others, chance: chance.randbytes(len(data)),
    "another file": _other,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("whole")
    with small_root(folder / "made") as made:
        made.root.rename(folder / "state")
        made.job.folder = type(made.job.folder)(str(folder / "state")).child("counts", QUERY)
        savepoint = savepoint_of(made.job, folder / "savepoint", batch=6)
        claim_savepoint(savepoint, SavepointClaim("5a" * 16, "/root/counts/mine", "mine"), ())
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "metadata").write_text('{"id": "somebody"}')
        yield folder


def _files(folder: Path) -> list[Path]:
    return sorted(it for name in ("state", "savepoint") for it in (folder / name).rglob("*") if it.is_file())


def _run(command: list[str], folder: Path, file: Path) -> tuple[int, bytes, str]:
    told = {"ROOT": folder / "state", "FOLDER": folder / "state" / "counts" / QUERY, "SAVEPOINT": folder / "savepoint"}
    told |= {"CHECKPOINT": folder / "checkpoint", "FILE": file}
    out, err = io.TextIOWrapper(io.BytesIO(), write_through=True), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(told.get(word, word)) for word in command])
    buffer = out.buffer
    assert isinstance(buffer, io.BytesIO)
    return code, buffer.getvalue(), err.getvalue()


def _damages() -> list[tuple[str, int]]:
    """Ways of damage with a seed each, which chooses the file."""
    chance = random.Random(_SEED)
    return [(list(_WAYS)[at % len(_WAYS)], chance.randrange(1 << 30)) for at in range(examples(60, 1_200))]


@pytest.mark.parametrize("part", range(_ROUNDS))
def test_a_damaged_file_is_a_typed_line(part: int, whole: Path, tmp_path: Path) -> None:
    files = _files(whole)
    right = [_run(command, whole, files[0]) for command in _COMMANDS]
    assert all(code in (0, 1) for code, _, _ in right), right
    found = set()
    for at, (how, seed) in enumerate(_damages()[part::_ROUNDS]):
        work = tmp_path / str(at)
        shutil.copytree(whole / "state", work / "state")
        shutil.copytree(whole / "savepoint", work / "savepoint")
        shutil.copytree(whole / "checkpoint", work / "checkpoint")
        chance = random.Random(seed)
        # Each kind as often: there are few documents and many deltas.
        kind = chance.choice(sorted({_kind(it) for it in files}))
        file = work / chance.choice([it for it in files if _kind(it) == kind]).relative_to(whole)
        damage = Damage(file.relative_to(work), how, seed)
        file.write_bytes(_WAYS[how](file.read_bytes(), _files(work), chance))
        for command, (was, said, _) in zip(_COMMANDS, right, strict=True):
            code, out, err = _run(command, work, file)
            found.add(code)
            _check(command, code, err, damage)
            if code == was and command[0] in _EXACT and code in (0, 1) and not _tolerated(how):
                assert out == said, f"{command} prints other rows after {damage}"
        shutil.rmtree(work)
    assert {0, 1, 3} <= found, "some commands do not read the file, some say what is wrong, and some cannot go on"


def _tolerated(how: str) -> bool:
    """Another file in its place may be one that is right there, of an older batch."""
    return how == "another file"


def _kind(path: Path) -> str:
    above = "savepoint" if "savepoint" in path.parts else "state"
    return f"{above} {re.sub(r'[0-9a-f]{16,}|[0-9]+', '', path.name)}"


def _check(command: list[str], code: int, err: str, damage: Damage) -> None:
    assert code in _DOCUMENTED, f"{command} exits with {code} after {damage}:\n{err}"
    assert "Traceback" not in err, f"{command} after {damage}:\n{err}"
    if code in (2, 3):
        typed = _TYPED.match(err.splitlines()[-1]) or _TYPED.match(err)
        assert typed, f"{command} after {damage}:\n{err}"
        assert issubclass(getattr(errors, typed[1]), errors.StateError)
