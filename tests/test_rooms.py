"""The structure of the code: imports point down, no function is long, and what a process has once is not in module globals."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from spark_state_ext.cli.app import COMMANDS, GROUPS
from tests.helpers.waiting import WAIT_S

ROOT = Path(__file__).parent.parent
PACKAGES = ("arrow_schemas", "spark_state_ext")


def _modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def test_imports_point_down() -> None:
    """The contracts in setup.cfg: no arrow upwards, no circle, no PySpark and no pandas in the core."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_says_what_it_holds() -> None:
    folders = {path.parent for path, _ in _modules()}
    silent = [
        str(folder)
        for folder in folders
        if not ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    ]
    assert not silent


# The most that a reader holds in mind.
LINES_MAX, PARAMETERS_MAX = 70, 8
# Users' own signatures: nothing else has so many.
MANY_PARAMETERS = {
    "spark_state_ext/erasing/history.py:erase_history",
    "spark_state_ext/reading/state_opener.py:open_state",
    "spark_state_ext/spark/source/committed_state.py:open_committed",
    "spark_state_ext/spark/client/state.py:ArrowState.__init__",
    "spark_state_ext/functions/state_batch.py:StateBatch.__init__",
    "spark_state_ext/testing/function_run.py:run",
    "spark_state_ext/testing/operator_run.py:run_operator",
}
# Classes whose instances are kept in a class or a module. The worker is the one that should be.
KEPT = {
    "spark_state_ext/worker/worker.py": "the worker itself",
    "spark_state_ext/worker/threads.py": "a process ends once, for all of its threads",
    "spark_state_ext/store/environment.py": "LMDB forbids to open an environment twice in a process, whoever asks",
}


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _code_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    text = ast.get_docstring(function, clean=False)
    said = 0 if text is None else (first.end_lineno or 0) - first.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - said


def test_no_function_is_long() -> None:
    long = {
        f"{path}:{name}": lines
        for path, tree in _modules()
        for name, function in _functions(tree)
        if (lines := _code_lines(function)) > LINES_MAX
    }
    assert not long


def test_few_functions_have_many_parameters() -> None:
    known = [it for group in (COMMANDS, *GROUPS.values()) for it in group.items()]
    commands = {(f"spark_state_ext/cli/{module}.py", name.replace("-", "_")) for name, (module, _) in known}
    found = set()
    for path, tree in _modules():
        for name, function in _functions(tree):
            if (str(path), name) in commands:
                continue  # Typer's way to have options: each is a parameter
            given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            if len([it for it in given if it.arg not in ("self", "cls")]) > PARAMETERS_MAX:
                found.add(f"{path}:{name}")
    assert found == MANY_PARAMETERS


def test_what_a_process_has_once_is_owned_by_its_worker() -> None:
    """No registry in a class or a module, but where it is said why."""
    found = set()
    for path, tree in _modules():
        for node in [*tree.body, *(it for cls in tree.body if isinstance(cls, ast.ClassDef) for it in cls.body)]:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            target = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            made = ast.unparse(node.value)
            empty = made in ("{}", "[]", "set()", "dict()") or "OrderedDict(" in made or "WeakKeyDictionary(" in made
            instance = isinstance(node, ast.AnnAssign) and "ClassVar" in ast.unparse(node.annotation) and made == "None"
            if target.startswith("_") and (empty or instance):
                found.add(str(path))
    assert found == set(KEPT)


def test_tasks_that_the_client_names_exist() -> None:
    """The client names the functions that tasks run by strings, which no type checker compares with the modules."""
    named = []
    for _, tree in _modules():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("run_task", "task_entry")
            ):
                named += [str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
    assert len(named) > 10
    for module, _, name in (task.partition(".") for task in named):
        assert callable(getattr(importlib.import_module(f"spark_state_ext.spark.executor.{module}"), name))
