"""The layout of the package: reading order is import order, few dependencies, a quick import, no asserts."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import minigen

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minigen"
# A file may import those before it. Names without a file are features that are not there (yet).
ORDER = (
    "checks files threads ops cache model checkpoint prompt_cache tokenizer sampler watcher decode beam speculative "
    "scoring api tracing colours session signals arguments cli __main__"
).split()
DEPENDENCIES = {"numpy", "safetensors", "tiktoken", "huggingface_hub"}
FILES = [name for name in ORDER if (PACKAGE / f"{name}.py").is_file()]


def package_imports(path):
    """The modules of the package that a file imports anywhere, in functions too; "" for the package itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "minigen." * bool(node.level) + (node.module or "")
            base = base.rstrip(".")
            # `from minigen import ops` names a module where there is such a file, and else something of __init__.
            names = [f"{base}.{alias.name}" if base == "minigen" else base for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "minigen":
                module = rest.partition(".")[0]
                found.add(module if module in ORDER or (path.parent / f"{module}.py").is_file() else "")
    return found


def other_imports(path):
    """The top-level names of all that a file imports from outside the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found - {"minigen"}


def faults(folder):
    """What is wrong with the imports of the package in `folder`, one sentence each."""
    found = []
    for path in sorted(folder.glob("**/*.py")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        imports = package_imports(path)
        if name == "__init__":
            found += [f"__init__ imports {other}" for other in imports & {"cli", "__main__"}]
            continue
        if name not in ORDER:
            found.append(f"{name} has no place in the reading order")
            continue
        if "" in imports and name not in ("tracing", "arguments", "cli", "__main__"):  # these want the version
            found.append(f"{name} imports the package as a whole")
        later = [other for other in imports - {""} if other not in ORDER[: ORDER.index(name)]]
        found += [f"{name} imports {other}, which comes after it" for other in later]
        if "cli" in imports and name != "__main__":
            found.append(f"{name} imports cli")
        if name == "speculative" and "beam" in imports:
            found.append("speculative imports beam")
        if name == "model" and imports & {"checkpoint", "tokenizer", "sampler", "decode"}:
            found.append("model knows of text or decoding")
        if name == "cache" and not imports <= {"checks", "ops"}:
            found.append("cache knows of more than checks and ops")
    return found


def test_every_file_imports_only_earlier_ones():
    assert FILES, "there is no package to look at"
    assert faults(PACKAGE) == []


@pytest.mark.parametrize(
    "name, source",
    [
        ("checks", "import minigen.ops"),
        ("cache", "from minigen.model import GPT2"),
        ("model", "from minigen import sampler"),
        ("model", "def forward():\n    from .tokenizer import Tokenizer"),
        ("speculative", "from minigen.beam import search"),
        ("beam", "from . import speculative"),
        ("api", "from minigen.cli import main"),
        ("decode", "import minigen"),
        ("__init__", "from minigen.cli import main"),
        ("helpers", ""),
        ("decoding/loop", ""),
    ],
)
def test_the_check_of_imports_sees_a_fault(tmp_path, name, source):
    for other in ORDER:
        (tmp_path / f"{other}.py").write_text("")
    assert faults(tmp_path) == []
    path = tmp_path / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    assert len(faults(tmp_path)) >= 1


@pytest.mark.parametrize("name", [*FILES, "__init__"])
def test_files_import_the_standard_library_and_the_four_dependencies_only(name):
    assert other_imports(PACKAGE / f"{name}.py") - set(sys.stdlib_module_names) <= DEPENDENCIES


@pytest.mark.parametrize("name", [*FILES, "__init__"])
def test_there_are_no_asserts(name):
    # They vanish under `python -O`, and users' errors deserve a sentence.
    tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
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
        "import minigen.cli\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))\n"
        "print('huggingface_hub' in sys.modules)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    package, package_has_hub, command, command_has_hub = done.stdout.splitlines()
    for modules in (package.split(), command.split()):
        assert set(modules) - set(sys.stdlib_module_names) <= {"minigen", "numpy", "safetensors", "tiktoken"}
    assert (package_has_hub, command_has_hub) == ("False", "False")
