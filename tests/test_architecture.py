"""House rules that a tool can hold: storeys, loads, sizes, names. Each exception stands here with its reason.

import-linter (scripts/check) reads the imports that are written; here it is also seen what an import really loads.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("cluster", "workers", "model_shards")
SOURCES = sorted(
    [*(path for name in PACKAGES for path in (PROJECT / name).rglob("*.py")), PROJECT / "shardserve.py"]
)
TESTS = sorted((PROJECT / "tests").rglob("*.py"))
TEXTS = sorted(
    [
        *SOURCES,
        *TESTS,
        *(path for name in ("deploy", "scripts", ".ci", "docs") for path in (PROJECT / name).rglob("*")),
        *(path for suffix in ("md", "toml", "txt", "yaml") for path in PROJECT.glob(f"*.{suffix}")),
    ]
)

LONGEST_FILE = 400
LONGEST_FUNCTION = 60
# Path or path:function -> why it may be longer.
LONGER_FOR_A_REASON: dict[str, str] = {}

# The modules, and packages with all below them, that may import Ray.
RAY_USERS = (
    "cluster.application",
    "cluster.cli",
    "cluster.client",
    "cluster.driver",
    "cluster.launch",
    "cluster.llm",
    "workers.actor",
)
MAY_PRINT = ("cluster.cli",)
MEANINGLESS_NAMES = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}


def name_of(path: Path) -> str:
    """cluster/driver/__init__.py -> cluster.driver"""
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in allowed)


def shown(path: Path) -> str:
    return str(path.relative_to(PROJECT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def functions_in(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the signature: a command of the command line has an option a line there."""
    return (function.end_lineno or 0) - function.body[0].lineno + 1


def imported_in(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module


def torch_free_modules() -> list[str]:
    """The modules of the contract in pyproject.toml, with all that lie below them."""
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    promised = next(each["source_modules"] for each in contracts if "torch" in each.get("forbidden_modules", []))
    return [name_of(path) for path in SOURCES if within(name_of(path), tuple(promised))]


def test_torch_free_modules_load_neither_torch_nor_ray() -> None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    loaded = {'torch', 'ray'} & set(sys.modules)\n"
        "    if loaded:\n"
        "        sys.exit(f'importing {name} loads {sorted(loaded)}')\n"
    )
    # The public face names everything, and must load nothing of it before it is used.
    modules = ["shardserve", *torch_free_modules()]
    assert len(modules) > 10
    command = [sys.executable, "-c", program, *modules]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_ray_is_imported_only_where_ray_is_used() -> None:
    users = {name_of(path) for path in SOURCES if any(within(name, ("ray",)) for name in imported_in(path))}
    assert {name for name in users if not within(name, RAY_USERS)} == set()


def test_imports_go_down_only() -> None:
    storey = {name: level for level, name in enumerate(reversed(PACKAGES))}
    upward = [
        f"{shown(path)} imports {imported}"
        for path in SOURCES
        if path.parent != PROJECT
        for imported in imported_in(path)
        if storey.get(imported.split(".")[0], -1) > storey[path.relative_to(PROJECT).parts[0]]
    ]
    assert upward == []


def test_every_module_says_what_it_owns() -> None:
    silent = [
        shown(path)
        for path in (*SOURCES, *TESTS)
        if path.read_text().strip() and not ast.get_docstring(tree_of(path))
    ]
    assert silent == []


def test_files_have_one_subject() -> None:
    lengths = {shown(path): len(path.read_text().splitlines()) for path in (*SOURCES, *TESTS)}
    long = {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE}
    assert {path: lines for path, lines in long.items() if path not in LONGER_FOR_A_REASON} == {}


def test_functions_do_one_thing() -> None:
    long = {
        f"{shown(path)}:{function.name}": length
        for path in SOURCES
        for function in functions_in(path)
        if (length := body_lines(function)) > LONGEST_FUNCTION
    }
    assert {place: lines for place, lines in long.items() if place not in LONGER_FOR_A_REASON} == {}


def test_the_exceptions_are_still_needed() -> None:
    existing = {shown(path) for path in (*SOURCES, *TESTS)}
    assert [each for each in LONGER_FOR_A_REASON if each.split(":")[0] not in existing] == []


def test_names_say_something() -> None:
    vague = [
        shown(path)
        for path in SOURCES
        if MEANINGLESS_NAMES & set(path.with_suffix("").parts[len(PROJECT.parts) :])
    ]
    assert vague == []


def test_only_the_command_line_prints() -> None:
    printing = [
        f"{shown(path)}:{node.lineno}"
        for path in SOURCES
        if not within(name_of(path), MAY_PRINT)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


def test_annotations_are_not_postponed_where_serve_reads_them() -> None:
    # Ray Serve looks at the annotation of a builder's parameter, and passes a raw dict where it is a string.
    assert "__future__" not in list(imported_in(PROJECT / "cluster" / "application.py"))


def test_comments_are_ascii() -> None:
    odd = [
        f"{shown(path)}:{token.start[0]}"
        for path in (*SOURCES, *TESTS)
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT and not token.string.isascii()
    ]
    assert odd == []


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("work left undone", r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
        ("a path of one machine", r"(?<![\w.])/(?:home/[a-z]|ro" + r"ot/|Users/|work/)"),
    ],
)
def test_no_text_has(what: str, pattern: str) -> None:
    found = [
        f"{shown(path)}:{number}"
        for path in TEXTS
        if path.is_file() and path.suffix != ".pyc"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == [], what


def test_every_folder_of_tests_is_a_package() -> None:
    # Without it pytest would import tests/cluster as `cluster`, in front of ours.
    folders = {path.parent for path in TESTS}
    assert [shown(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_tests_on_real_clusters_have_a_folder_of_their_own() -> None:
    # scripts/test runs that folder last, and all others without what is marked so.
    marked = {shown(path) for path in TESTS if re.search(r"mark\.system\b", path.read_text())}
    assert marked == {shown(path) for path in (PROJECT / "tests" / "system").glob("test_*.py")}


def test_the_architecture_names_every_storey() -> None:
    text = (PROJECT / "ARCHITECTURE.md").read_text()
    assert [name for name in (*PACKAGES, "deploy", "tests", "scripts") if f"{name}/" not in text] == []


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_links_of_a_document_lead_somewhere(document: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", (PROJECT / document).read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (PROJECT / target).exists()] == []
