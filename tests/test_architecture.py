"""Imports point one way: a module may import only its own package and those before it."""

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

REPO = pathlib.Path(__file__).parents[1]
ROOT = REPO / "spmdlab"
ORDER = (
    "errors lookup units axes hardware hlo cost timeline pipeline strategies models data workload "
    "training config targets mesh train compile report row pool dump verify run audit tune lab "
    "testing"
).split()

# These never import jax, not even inside a function.
NO_JAX = set(
    "errors lookup units axes hardware hlo cost timeline pipeline training config report pool "
    "dump lab".split()
)
# So do these modules of packages that elsewhere may.
NO_JAX_FILES = {
    "models/config.py",
    *(f"verify/{name}.py" for name in "compare diagnose hang patterns tolerance".split()),
    *(f"run/{name}.py" for name in "directory guard manifest metrics stop".split()),
}
# These may use jax inside functions, but importing them must not bring it in.
LAZY_JAX = {"workload", "targets", "data"}
LAZY_JAX_FILES = {"verify/supervise.py"}
# The modules of a package that may have jax at the top; all its others must not.
JAX_AT_TOP = {"strategies": {"resolve.py", "plan.py"}}

FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]
LIBRARIES_WITH_JAX = {"flax", "grain", "jax", "jaxlib", "optax", "orbax"}


def imports(nodes: Iterator[ast.AST], path: pathlib.Path) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def all_imports(path: pathlib.Path) -> list[str]:
    return list(imports(ast.walk(ast.parse(path.read_text())), path))


def place(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def works_without_jax(path: pathlib.Path) -> bool:
    return place(path) in NO_JAX or str(path.relative_to(ROOT)) in NO_JAX_FILES


def imports_without_jax(path: pathlib.Path) -> bool:
    if place(path) in JAX_AT_TOP:
        return path.name not in JAX_AT_TOP[place(path)]
    lazy = place(path) in LAZY_JAX or str(path.relative_to(ROOT)) in LAZY_JAX_FILES
    return lazy or works_without_jax(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here = place(path)
    assert here in ORDER, f"{here} has no place in the import order"
    for name in all_imports(path):
        top, *rest = name.split(".")
        assert top not in {"benchmarks", "configs", "launch", "tests"}, f"{here} imports {name}"
        if top == "spmdlab" and name != "spmdlab.__version__":
            assert rest, f"{here}: import a module of spmdlab, not spmdlab itself"
            assert rest[0] in ORDER, f"{here} imports {name}, which has no place in the order"
            # `lab` loads `row` inside functions that need it; all others only look back.
            assert ORDER.index(rest[0]) <= ORDER.index(here), f"{here} may not import {rest[0]}"
        assert top not in LIBRARIES_WITH_JAX or not works_without_jax(path), (
            f"{here} must work without jax, but imports {name}"
        )


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_importing_the_light_modules_brings_no_jax_in():
    """What the import rule cannot see: jax brought in by somebody else's library."""
    names = [module_name(path) for path in FILES if imports_without_jax(path)]
    assert "spmdlab.lab" in names
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    found = {'jax', 'jaxlib', 'flax', 'optax'} & set(sys.modules)\n"
        "    assert not found, f'importing {name} imports {found}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("path", sorted((REPO / "launch").glob("*.py")), ids=lambda p: p.name)
def test_launch_scripts_hold_no_logic(path):
    for name in all_imports(path):
        if name.startswith("spmdlab."):
            assert name.split(".")[1] in {"config", "errors", "lab", "lookup", "report"}, (
                f"imports {name}"
            )
    if path.name != "command.py":
        assert len(path.read_text().splitlines()) <= 60


def test_no_file_is_too_long_or_has_a_name_that_says_nothing():
    for path in FILES:
        assert path.stem not in {"utils", "common", "helpers", "misc"}, path
        assert len(path.read_text().splitlines()) <= 400, f"{path}: more than 400 lines"
