"""The structure of the code: imports point down, no function is long, and module globals do not hold a process's state."""

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


def parse_modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def test_imports_point_down() -> None:
    """Check the contracts in setup.cfg: no imports upwards, no cycles, no PySpark and no pandas in the core."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_has_a_docstring() -> None:
    folders = {path.parent for path, _ in parse_modules()}
    without_docstring = [
        str(folder)
        for folder in folders
        if not ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    ]
    assert not without_docstring


# Limits for readable functions.
LINES_MAX, PARAMETERS_MAX = 70, 8
# Only these functions, which users call, have more parameters.
MANY_PARAMETERS = {
    "spark_state_ext/erasing/history.py:erase_history",
    "spark_state_ext/reading/state_opener.py:open_state",
    "spark_state_ext/spark/source/committed_state.py:open_committed",
    "spark_state_ext/spark/client/state.py:ArrowState.__init__",
    "spark_state_ext/functions/state_batch.py:StateBatch.__init__",
    "spark_state_ext/testing/function_run.py:run",
    "spark_state_ext/testing/operator_run.py:run_operator",
}
# Modules that keep instances in a class or a global, and the reason. Normally only the worker should.
KEPT = {
    "spark_state_ext/worker/worker.py": "the worker itself",
    "spark_state_ext/worker/threads.py": "a process ends once, for all of its threads",
    "spark_state_ext/store/environment.py": "LMDB forbids a process to open an environment twice",
}


def list_functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def count_code_lines(function: ast.FunctionDef) -> int:
    """Return the number of lines of a function without its docstring."""
    first = function.body[0]
    text = ast.get_docstring(function, clean=False)
    docstring_lines = 0 if text is None else (first.end_lineno or 0) - first.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - docstring_lines


def test_no_function_is_long() -> None:
    long = {
        f"{path}:{name}": lines
        for path, tree in parse_modules()
        for name, function in list_functions(tree)
        if (lines := count_code_lines(function)) > LINES_MAX
    }
    assert not long


def test_few_functions_have_many_parameters() -> None:
    known = [command for group in (COMMANDS, *GROUPS.values()) for command in group.items()]
    commands = {(f"spark_state_ext/cli/{module}.py", name.replace("-", "_")) for name, (module, _) in known}
    functions = set()
    for path, tree in parse_modules():
        for name, function in list_functions(tree):
            if (str(path), name) in commands:
                continue  # with Typer, each option is a parameter
            parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            if len([parameter for parameter in parameters if parameter.arg not in ("self", "cls")]) > PARAMETERS_MAX:
                functions.add(f"{path}:{name}")
    assert functions == MANY_PARAMETERS


def test_only_listed_modules_keep_a_registry_in_a_class_or_a_global() -> None:
    """The worker owns the state of a process; the other modules in `KEPT` have a reason."""
    modules = set()
    for path, tree in parse_modules():
        for node in [*tree.body, *(inner for cls in tree.body if isinstance(cls, ast.ClassDef) for inner in cls.body)]:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            target = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            value = ast.unparse(node.value)
            empty = value in ("{}", "[]", "set()", "dict()") or "OrderedDict(" in value or "WeakKeyDictionary(" in value
            instance = (
                isinstance(node, ast.AnnAssign) and "ClassVar" in ast.unparse(node.annotation) and value == "None"
            )
            if target.startswith("_") and (empty or instance):
                modules.add(str(path))
    assert modules == set(KEPT)


def test_task_functions_that_the_client_names_exist() -> None:
    """The client names the functions of tasks by strings, which no type checker compares with the modules."""
    named = []
    for _, tree in parse_modules():
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
