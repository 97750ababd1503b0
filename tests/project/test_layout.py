"""The layout of the package: one import rule per folder, few dependencies, a quick import, no asserts."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import minigen

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "minigen"
# What the files of each folder, and the single files beside the folders, may import of the package.
BELOW_API = ("kernels", "engine", "text", "files", "options", "results")
ALLOWED = {
    "kernels": ("kernels",),
    "engine": ("kernels", "engine"),
    "text": ("engine", "text", "files"),
    "files": ("kernels", "engine", "files"),
    "options": ("engine",),
    "results": ("engine", "text"),
    "api": BELOW_API,
    "scoring": BELOW_API,
    "session": (*BELOW_API, "api"),
    "tracing": (*BELOW_API, "api", "tracing", "session", "scoring", ""),  # "": the version
    "command": (*BELOW_API, "api", "tracing", "session", "scoring", "command", ""),
    "__main__": ("command",),
    "__init__": (*BELOW_API, "api", "tracing", "session", "scoring"),
}
DEPENDENCIES = {"numpy", "safetensors", "threadpoolctl", "tiktoken", "huggingface_hub"}
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_imports(path):
    """The parts of the package that a file imports anywhere, in functions too; "" is the package itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "minigen":
            names = [f"minigen.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["minigen.relative" if node.level else node.module]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "minigen":
                yield rest.partition(".")[0]


def other_imports(path):
    """The top-level names of all that a file imports from outside the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found - {"minigen", "typing_extensions"}  # the latter under TYPE_CHECKING, as test_import_is_light shows


@pytest.mark.parametrize("name", SOURCES)
def test_each_folder_imports_only_what_it_may(name):
    part = name.removesuffix(".py").partition("/")[0]
    assert set(package_imports(SOURCES[name])) <= set(ALLOWED[part])
    allowed = {"kernels": {"numpy", "threadpoolctl"}, "engine": {"numpy"}}.get(part, DEPENDENCIES)
    assert other_imports(SOURCES[name]) - set(sys.stdlib_module_names) <= allowed


def test_the_engine_reads_no_file_and_no_json():
    for name, path in SOURCES.items():
        if name.startswith(("engine/", "kernels/")):
            assert not other_imports(path) & {"json", "pathlib", "io", "argparse", "sys", "codecs", "re"}, name


@pytest.mark.parametrize("name", SOURCES)
def test_there_are_no_asserts(name):
    # They vanish under `python -O`, and users' errors deserve a sentence.
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)] == []


def test_benchmarks_use_public_names_only():
    public = {*minigen.__all__, "__version__"}
    for path in sorted(ROOT.glob("benchmarks/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.name}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("minigen.") for alias in node.names), where
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "minigen":
                assert node.module == "minigen" and {alias.name for alias in node.names} <= public, where
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "minigen":
                assert node.attr in public, where


def test_public_names_exist():
    assert len(set(minigen.__all__)) == len(minigen.__all__)
    for name in minigen.__all__:
        assert hasattr(minigen, name), name


def test_import_is_light():
    # What numpy, safetensors and tiktoken bring along themselves is not minigen's doing; the hub's client would more
    # than double the time that every run takes to start.
    script = (
        "import sys, numpy, safetensors, tiktoken\n"
        "before = set(sys.modules)\n"
        "import minigen\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))\n"
        "print('huggingface_hub' in sys.modules)\n"
        "import minigen.command.main\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))\n"
        "print('huggingface_hub' in sys.modules)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    package, package_has_hub, command, command_has_hub = done.stdout.splitlines()
    for modules in (package.split(), command.split()):
        assert set(modules) - set(sys.stdlib_module_names) <= {"minigen", "numpy", "safetensors", "tiktoken"}
    assert (package_has_hub, command_has_hub) == ("False", "False")
