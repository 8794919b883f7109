"""Commands on damaged files end with a documented exit code and an error line that names the error's type.

Each case damages one file of a small root or savepoint and runs every read-only command: about twenty cases in the
suite, 1,200 in the long form. If a command that reads all that it prints succeeds, its output must be that of the intact
files.
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
_ROUNDS = 2
_DOCUMENTED_CODES = frozenset({0, 1, 2, 3})
_ERROR_LINE = re.compile(r"spark-state-ext [a-z ]+: (\w+): \S")
# Read-only commands on the root, its query folder, and the savepoint.
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
# These commands read all that they print, so if they succeed, their output is that of the intact files.
_EXACT_COMMANDS = frozenset({"get", "scan", "diff"})


@dataclass(frozen=True)
class Damage:
    """The damage to one file."""

    path: Path
    how: str
    seed: int

    def __str__(self) -> str:
        return f"{self.how} (seed {self.seed}) of {self.path}"


def _flip_bit(data: bytes, others: list[Path], chance: random.Random) -> bytes:
    at = chance.randrange(max(1, len(data)))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def _replace_by_other(data: bytes, others: list[Path], chance: random.Random) -> bytes:
    return chance.choice(others).read_bytes()


_DAMAGES: dict[str, Callable[[bytes, list[Path], random.Random], bytes]] = {
    "flip": _flip_bit,
    "truncate": lambda data, others, chance: data[: chance.randrange(len(data))],
    "extend": lambda data, others, chance: data + chance.randbytes(chance.randrange(1, 64)),
    "empty": lambda data, others, chance: b"",
    "garbage": lambda data, others, chance: chance.randbytes(len(data)),
    "another file": _replace_by_other,
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("intact")
    with small_root(folder / "small") as small:
        small.root.rename(folder / "state")
        small.job.folder = type(small.job.folder)(str(folder / "state")).child("counts", QUERY)
        savepoint = savepoint_of(small.job, folder / "savepoint", batch=6)
        claim_savepoint(savepoint, SavepointClaim("5a" * 16, "/root/counts/mine", "mine"), ())
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "metadata").write_text('{"id": "somebody"}')
        yield folder


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for name in ("state", "savepoint") for path in (folder / name).rglob("*") if path.is_file())


def _run(command: list[str], folder: Path, file: Path) -> tuple[int, bytes, str]:
    paths = {"ROOT": folder / "state", "FOLDER": folder / "state" / "counts" / QUERY, "SAVEPOINT": folder / "savepoint"}
    paths |= {"CHECKPOINT": folder / "checkpoint", "FILE": file}
    out, err = io.TextIOWrapper(io.BytesIO(), write_through=True), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(paths.get(word, word)) for word in command])
    buffer = out.buffer
    assert isinstance(buffer, io.BytesIO)
    return code, buffer.getvalue(), err.getvalue()


def _choose_damages() -> list[tuple[str, int]]:
    """Return kinds of damage, each with a seed that chooses the file."""
    chance = random.Random(_SEED)
    return [(list(_DAMAGES)[at % len(_DAMAGES)], chance.randrange(1 << 30)) for at in range(examples(20, 1_200))]


@pytest.mark.parametrize("part", range(_ROUNDS))
def test_a_command_on_a_damaged_file_ends_with_a_typed_error_or_the_right_output(
    part: int, intact: Path, tmp_path: Path
) -> None:
    files = _list_files(intact)
    expected = [_run(command, intact, files[0]) for command in _COMMANDS]
    assert all(code in (0, 1) for code, _, _ in expected), expected
    codes = set()
    for at, (how, seed) in enumerate(_choose_damages()[part::_ROUNDS]):
        work = tmp_path / str(at)
        shutil.copytree(intact / "state", work / "state")
        shutil.copytree(intact / "savepoint", work / "savepoint")
        shutil.copytree(intact / "checkpoint", work / "checkpoint")
        chance = random.Random(seed)
        # Choose the kind of file first, because there are few documents and many deltas.
        kind = chance.choice(sorted({_kind_of(path) for path in files}))
        file = work / chance.choice([path for path in files if _kind_of(path) == kind]).relative_to(intact)
        damage = Damage(file.relative_to(work), how, seed)
        file.write_bytes(_DAMAGES[how](file.read_bytes(), _list_files(work), chance))
        for command, (intact_code, intact_out, _) in zip(_COMMANDS, expected, strict=True):
            code, out, err = _run(command, work, file)
            codes.add(code)
            _check(command, code, err, damage)
            if code == intact_code and command[0] in _EXACT_COMMANDS and code in (0, 1) and not _may_be_valid(how):
                assert out == intact_out, f"{command} prints other rows after {damage}"
        shutil.rmtree(work)
    assert {0, 1, 3} <= codes, "some commands do not read the file, some report the damage, and some cannot continue"


def _may_be_valid(how: str) -> bool:
    """Return whether the damaged file may be valid: another file may be the right one of an older batch."""
    return how == "another file"


def _kind_of(path: Path) -> str:
    folder = "savepoint" if "savepoint" in path.parts else "state"
    return f"{folder} {re.sub(r'[0-9a-f]{16,}|[0-9]+', '', path.name)}"


def _check(command: list[str], code: int, err: str, damage: Damage) -> None:
    assert code in _DOCUMENTED_CODES, f"{command} exits with {code} after {damage}:\n{err}"
    assert "Traceback" not in err, f"{command} after {damage}:\n{err}"
    if code in (2, 3):
        error = _ERROR_LINE.match(err.splitlines()[-1]) or _ERROR_LINE.match(err)
        assert error, f"{command} after {damage}:\n{err}"
        assert issubclass(getattr(errors, error[1]), errors.StateError)
