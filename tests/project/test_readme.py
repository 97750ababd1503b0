"""README and docs: each command prints what is shown under it, links lead somewhere, and README stays short.

    python -m tests.project.test_readme      writes what the commands print now under them

A page shows commands in three ways: a `console` block has "$ command" lines, each with its output under it; a `sh` or
`python` block followed by a `text` block has its output there; a `sh` or `python` block alone shows no output, and only
has to run. Commands that match `NOT_RUN` are left out.
"""

import contextlib
import difflib
import functools
import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from minigen.api import load
from minigen.command.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))]
LINKED = [*PAGES, "minigen/README.md", "benchmarks/README.md"]

# Installs something, needs the network or a model that is not bundled, or takes more than ten seconds.
NOT_RUN = re.compile(r"\b(venv \.venv|pip|pytest|gpt2\S*|benchmarks|tests)\b")
# Times and speeds differ from run to run, and the layout of weights from machine to machine.
TIMES = re.compile(r"\d+\.\d+ s\b|\d+\.\d+ tokens/s|\d+\.\d+/s|layout \w+")
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)  # indented in lists
HABITS = "but for|anew|beside|as it were|is no|has not|need not|take over|so many|come about|a second|stands|lies"


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------- running what a page shows


def run_command(arguments, stdin, last_code):
    """Run one command of a pipe in this process, and return its exit code; its output goes to stdout and stderr."""
    name, *rest = arguments
    if name in ("python", ".venv/bin/python") and rest[:2] == ["-m", "minigen"]:
        name, rest = "minigen", rest[2:]
    if name == "minigen":
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
        return main(rest)
    elif name == "echo":
        print(*(str(last_code) if word == "$?" else word for word in rest))
    elif name == "cat":
        print("".join(Path(file).read_text(encoding="utf-8") for file in rest), end="")
    elif name == "diff":
        old, new = (Path(file).read_text(encoding="utf-8").splitlines(keepends=True) for file in rest)
        print("".join(difflib.unified_diff(old, new, *rest)), end="")
    else:
        raise AssertionError(f"{name} is not a command that this test can run: add it, or match it by NOT_RUN")
    return 0


def run_shell(line):
    """What a line of shell prints, as a terminal shows it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>&;")
    lexer.whitespace_split = True
    screen, stdin, arguments = io.StringIO(), "", []
    words, code = [*lexer, ";"], 0
    while words:
        word = words.pop(0)
        if word not in ("|", ">", "&&", ";"):
            arguments.append(word)
            continue
        stdout = screen if word in ("&&", ";") else io.StringIO()
        if not NOT_RUN.search(" ".join(arguments)) and arguments:
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(screen):
                code = run_command(arguments, stdin, code)
        stdin, arguments = stdout.getvalue() if word == "|" else "", []
        if word == ">":
            Path(words.pop(0)).write_text(stdout.getvalue(), encoding="utf-8")
    assert code == 0, f"{line} ends with exit code {code}: {screen.getvalue()}"
    return screen.getvalue()


def run_python(code):
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        exec(compile(code, "python", "exec"), {"__name__": "__main__"})
    return stdout.getvalue()


def run_console(block):
    """A console block with what its commands print now."""
    lines = []
    for entry in re.split(r"^(?=\$ )", block, flags=re.MULTILINE):
        if entry:
            command, _, shown = entry.removeprefix("$ ").partition("\n")
            lines.append(f"$ {command}\n{shown if NOT_RUN.search(command) else run_shell(command)}")
    return "".join(lines)


def as_run(text):
    """A page's text with each output block replaced by what its commands print now."""
    parts, end = [], 0
    blocks = list(FENCE.finditer(text))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        indent, kind, code = block[1], block[2], textwrap.dedent(block[3])
        target, output = None, None
        if kind == "console":
            target, output = block, run_console(code)
        elif kind in ("sh", "python"):
            shows = following and following[2] == "text" and not text[block.end() : following.start()].strip()
            target = following if shows else None
            if kind == "sh":
                # Lines that end with a backslash go on.
                output = "".join(run_shell(line) for line in code.replace("\\\n", " ").splitlines())
            elif not NOT_RUN.search(re.sub("#.*", "", code)):
                output = run_python(code)
            else:
                target = None
        if target:
            # The header names the model's folder from the working directory, which is the checkout's for a reader.
            parts += [text[end : target.start(3)], textwrap.indent(output.replace(f"{ROOT}/", ""), indent)]
            end = target.end(3)
    return "".join([*parts, text[end:]])


@contextlib.contextmanager
def workplace(folder):
    """Work in a folder with the checkout's weights and licence; afterwards, folder and stdin are as before."""
    before, stdin = Path.cwd(), sys.stdin
    for name in ("weights", "LICENSE"):
        (Path(folder) / name).symlink_to(ROOT / name)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.stdin = stdin


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("minigen.command.main.load", functools.cache(load))
    text = read(page)
    with workplace(tmp_path):
        printed = as_run(text)
    assert TIMES.sub("TIME", printed) == TIMES.sub("TIME", text)


def test_the_header_names_the_folder_from_the_working_directory(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["The fox", "-n", "0"]) == 0
    assert "fairytale (weights/fairytale)," in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- the text itself


def test_readme_is_short():
    text = read("README.md")
    assert len(text.splitlines()) <= 200
    assert len(text.split()) <= 2200


def anchors(page):
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", read(page))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{target} is missing"
        if anchor:
            assert anchor in anchors(path.resolve().relative_to(ROOT).as_posix()), f"{target} has no such heading"


def test_excerpts_are_lines_of_the_files_linked_above_them():
    text = read("README.md")
    for block in FENCE.finditer(text):
        if block[2] == "py":
            file = re.findall(r"\((minigen/[\w/]+\.py)\)", text[: block.start()])[-1]
            remaining = iter(line.strip() for line in read(file).splitlines())
            missing = [line for line in block[3].splitlines() if line.strip() not in remaining]
            assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_linked_from_readme(page):
    assert page == "README.md" or f"]({page}" in read("README.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_text_keeps_to_plain_english(page):
    text = " ".join(FENCE.sub("", read(page)).lower().split())
    assert re.findall(rf"\b({HABITS})\b", text) == []


if __name__ == "__main__":
    for page in sys.argv[1:] or PAGES:
        with tempfile.TemporaryDirectory() as folder, workplace(folder):
            updated = as_run(read(page))
        (ROOT / page).write_text(updated, encoding="utf-8")
