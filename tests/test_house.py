"""The house: three floors, imports only go down, and torch stays where it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import memfit

PACKAGE = Path(memfit.__file__).parent
FACES = (
    "memfit.cli",
    "memfit.report",
    "memfit.export",
    "memfit.pytest_plugin",
    "memfit.__main__",
)
VERBS = (
    "memfit.probe",
    "memfit.afterwards",
    "memfit.capacity",
    "memfit.gate",
    "memfit.gate_run",
    "memfit.measure",
    "memfit.verify",
    "memfit.run",
)
KNOW_TORCH = {
    "memfit.allocator",
    "memfit.devices.memory",
    "memfit.group",
    "memfit.selftest",
    "memfit.trial.checks",
    "memfit.trial.growth",
    "memfit.trial.noticing",
    "memfit.trial.passes",
    "memfit.trial.lazy",
    "memfit.trial.ledger_recorder",
    "memfit.trial.nursery",
    "memfit.trial.replicas",
    "memfit.trial.storages",
    "memfit.trial.timeline",
    "memfit.trial.worker",
    "memfit.virtual.values",
    "memfit.workload",
}
TORCH_AT_ONCE = {"memfit.trial.replicas", "memfit.virtual.values"}
"""Made of torch's own classes; only the worker imports it, inside a function."""
VERIFIER = "memfit.verify.worker"
"""A process of its own; all of it imports torch at once, and nothing else imports it."""
HEAVY = {"torch", "pandas", "matplotlib", "jinja2", "numpy"}


@dataclass(frozen=True, slots=True)
class Import:
    """One import in a module."""

    module: str
    """The module that imports."""
    name: str
    """What it imports."""
    at_once: bool
    """Whether importing the module imports it."""
    for_types: bool
    """Whether only a type checker sees it."""


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _imports_of(path: Path) -> list[Import]:
    module = ".".join(["memfit", *path.relative_to(PACKAGE).with_suffix("").parts])
    found: list[Import] = []

    def walk(node: ast.AST, *, at_once: bool, for_types: bool) -> None:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            origin = node.module or ""
            names = [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
        found.extend(
            Import(module.removesuffix(".__init__"), name, at_once, for_types) for name in names
        )
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            walk(
                child,
                at_once=at_once and not inside,
                for_types=for_types or _is_type_checking(node),
            )

    walk(ast.parse(path.read_text()), at_once=True, for_types=False)
    return found


IMPORTS = [found for path in sorted(PACKAGE.rglob("*.py")) for found in _imports_of(path)]
MODULES = sorted({found.module for found in IMPORTS})


def within(name: str, *packages: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def floor(module: str) -> int:
    if within(module, *FACES):
        return 2
    return 1 if within(module, *VERBS) else 0


def imports(module: str) -> list[Import]:
    return [found for found in IMPORTS if found.module == module]


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_go_down(module: str) -> None:
    up = [i.name for i in imports(module) if not i.for_types and floor(i.name) > floor(module)]
    assert up == []


@pytest.mark.parametrize("module", MODULES)
def test_torch_is_imported_only_where_it_is_needed_and_then_late(module: str) -> None:
    seen = [i for i in imports(module) if within(i.name, "torch") and not i.for_types]

    assert not seen or module in KNOW_TORCH or within(module, VERIFIER)
    at_once = module in TORCH_AT_ONCE or within(module, VERIFIER)
    assert at_once or not [i for i in seen if i.at_once]


def test_the_process_that_verifies_is_imported_by_nobody_else() -> None:
    users = {i.module for i in IMPORTS if within(i.name, VERIFIER) and not i.for_types}

    assert not {user for user in users if not within(user, VERIFIER)}


def test_what_imports_torch_at_once_is_imported_late_and_by_the_worker_alone() -> None:
    users = [i for i in IMPORTS if within(i.name, *TORCH_AT_ONCE) and not i.for_types]

    assert {i.module for i in users} <= {"memfit.trial.worker"}
    assert not [i for i in users if i.at_once]


@pytest.mark.parametrize("module", [m for m in MODULES if floor(m) == 2])
def test_faces_know_no_torch_at_all(module: str) -> None:
    assert not [i for i in imports(module) if within(i.name, "torch")]


@pytest.mark.parametrize(
    "module",
    [
        "memfit.batch",
        "memfit.gate",
        "memfit.search",
        "memfit.outcomes",
        "memfit.capacity.table",
        "memfit.capacity.matrix",
        "memfit.capacity.cells",
        "memfit.capacity.needs",
        "memfit.verify.findings",
        "memfit.verify.judge",
    ],
)
def test_the_pure_modules_start_nothing_and_read_nothing(module: str) -> None:
    impure = {"os", "subprocess", "pathlib", "psutil", "time", "random", "socket"}
    assert not {i.name for i in imports(module)} & impure


def test_only_the_command_line_knows_how_a_process_ends() -> None:
    ends = [
        i.module
        for i in IMPORTS
        if i.name in ("typer", "click") and not within(i.module, "memfit.cli")
    ]
    assert ends == []


@pytest.mark.parametrize(
    "name",
    [
        "memfit",
        "memfit.cli",
        "memfit.probe",
        "memfit.verify.run",
        "memfit.trial.runner",
        "memfit.workload",
    ],
)
def test_importing_the_parents_side_loads_nothing_heavy(name: str) -> None:
    code = f"import sys, {name}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_public_names_are_those_that_are_announced() -> None:
    code = "import memfit; print(*dir(memfit)); [getattr(memfit, name) for name in dir(memfit)]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert set(done.stdout.split()) == set(memfit.__all__)


@pytest.mark.parametrize("name", memfit.__all__)
def test_every_public_name_is_there_and_explained(name: str) -> None:
    public = getattr(memfit, name)
    assert isinstance(public, str) or public.__doc__


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
