"""Mutation testing: is there a test that fails for each small fault in the code? Not part of the suite.

    pip install -e '.[test,mutation]' && nice python -m tests.mutation [NAME ...]

A NAME is a module of `TESTS`, or the beginning of a mutant's name, as in `engine.sampler.x_draw`. mutmut
makes the mutants: a copy of the file in which every function has all its mutants beside it and a switch between them.
(It leaves alone what stands outside functions, functions with a decorator, and calls of len and isinstance.) Imports
and collection are paid once: each mutant runs in a fork, with the tests that call its function, the quickest first,
until one fails. (That a test calls it in a process of its own is not seen.) What is printed are the mutants that no
test noticed. Mutants that differ in the wording of a sentence alone are counted, but not run.
"""

import argparse
import ast
import difflib
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state
from mutmut.utils.format_utils import mangled_name_from_mutant_name

ROOT = Path(__file__).parents[1]
TESTS = {  # module of minigen -> the tests that are there to find its faults
    "engine.sampler": ["engine/test_sampler.py"],
    "engine.cache": ["engine/test_cache.py", "engine/test_forward.py", "engine/test_decode.py"],
    "engine.beam": ["engine/test_beam.py", "files/test_prompt_cache.py", "interface/test_trace.py"],
    "engine.speculative": ["engine/test_speculative.py", "files/test_prompt_cache.py", "interface/test_trace.py"],
    "text.tokenizer": ["text/test_tokenizer.py"],
}
OPTIONS = ["-q", "-x", "-o", "addopts=", "-p", "no:xdist", "-p", "no:cacheprovider", "--assert=plain", "--tb=native"]


def functions_of(code):
    """name -> source of every function, itself called f."""
    found, lines = {}, code.split("\n")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef):
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            found[node.name] = textwrap.dedent(source).replace(f"def {node.name}(", "def f(", 1)
    return found


def without_sentences(source):
    """The source, every string of three words or more being the same one: what is left if wording does not matter."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 2:
            node.value = "a sentence"
    return ast.unparse(tree)


def limited(seconds):
    """End this process after so many seconds on a core, or after an hour in which it does nothing."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # endless lists are ended sooner by this
    signal.alarm(3600)


def outcome_of(pid):
    """Wait for a limited process: "killed" if a test failed in it, "timeout" or "survived"."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status in (-signal.SIGPROF, -signal.SIGXCPU, -signal.SIGALRM, -signal.SIGKILL):
        return "timeout"
    return "killed" if status else "survived"


class Mutants:
    """A pytest plugin that runs the tests once for each mutant instead of once."""

    def __init__(self, module, code, names, files, out, most_seconds):
        self.module, self.names, self.files, self.out = module, names, files, out
        self.most_seconds = most_seconds
        self.functions = functions_of(code)
        self.seconds = {}
        self.outcomes = dict.fromkeys(("killed", "timeout", "survived", "not called", "wording"), 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        start = sum(os.times()[:4])
        result = yield
        self.seconds[item] = sum(os.times()[:4]) - start  # on the processor, in processes that it started too
        return result

    def passes(self, session, item, following=None):
        """Run one test, what it shares with the following one being kept."""
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return not session.testsfailed

    def all_pass(self, session, items):
        """Run tests until one fails. One that takes much longer than it did ends this process."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            signal.setitimer(signal.ITIMER_PROF, 10 + 5 * self.seconds[item])
            if not self.passes(session, item, following):
                return False
        return True

    def in_a_fork(self, session, items, name, limit):
        pid = os.fork()
        if pid == 0:
            limited(limit)
            set_mutant_under_test(f"minigen.{self.module}.{name}")
            try:
                passed = self.all_pass(session, items)
            except BaseException:
                passed = False
            os._exit(0 if passed else 1)
        return outcome_of(pid)

    def in_a_new_process(self, name, limit):
        """For functions that run while the module is imported."""
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *OPTIONS, *self.files],
            env=os.environ | {"MUTANT_UNDER_TEST": f"minigen.{self.module}.{name}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: limited(limit),
        )
        return outcome_of(process.pid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        at_import = set(state()._stats)  # the names of the functions that were called since it was emptied
        tests_of = {}
        for item in session.items:  # alone, so that it calls what sets up anything it shares
            state()._stats.clear()
            if not self.passes(session, item):
                return True  # pytest ends with a failed test
            for function in state()._stats:
                tests_of.setdefault(function, []).append(item)
        for function, items in tests_of.items():
            items.sort(key=self.seconds.get)
            until = itertools.accumulate(map(self.seconds.get, items))
            tests_of[function] = [item for item, end in zip(items, until, strict=True) if end <= self.most_seconds]
        in_use = [item for item in session.items if any(item in items for items in tests_of.values())]
        if self.in_a_fork(session, in_use, "none", 1000) != "survived":
            raise RuntimeError("what passes here fails when it is run again, in a fork")
        for number, name in enumerate(self.names, 1):
            function = mangled_name_from_mutant_name(name)
            sources = [self.functions[f"{function}__mutmut_orig"], self.functions[name]]
            items = tests_of.get(f"minigen.{self.module}.{function}", [])
            limit = 20 + int(3 * sum(map(self.seconds.get, items or session.items)))
            if without_sentences(sources[0]) == without_sentences(sources[1]):
                outcome = "wording"
            elif f"minigen.{self.module}.{function}" in at_import:
                outcome = self.in_a_new_process(name, limit)
            elif items:
                outcome = self.in_a_fork(session, items, name, limit)
            else:
                outcome = "not called"
            self.outcomes[outcome] += 1
            if number % 50 == 0:
                print(f"{self.module}: {number} of {len(self.names)}, {self.outcomes}", file=self.out, flush=True)
            if outcome not in ("killed", "wording"):
                lines = [line for line in difflib.ndiff(*(source.split("\n") for source in sources)) if line[0] in "-+"]
                heading = f"{self.module}.{name}: {outcome} ({number} of {len(self.names)})"
                print(heading, *lines, sep="\n", file=self.out, flush=True)
        print(f"{self.module}: {len(self.names)} mutants, {self.outcomes}", file=self.out, flush=True)
        return True


def run_mutants(module, wanted, seconds, selection):
    """In a copy of the project: put the mutants of one file in its place and run the tests that are there for it."""
    os.environ |= {"PYTHONPATH": os.getcwd(), "MUTANT_UNDER_TEST": "stats"}
    path = Path("minigen", *module.split(".")).with_suffix(".py")
    mutated = mutate_file_contents(str(path), path.read_text(encoding="utf-8"))
    path.write_text(mutated.code, encoding="utf-8")
    names = [name for name in mutated.mutant_names if any(f"{module}.{name}".startswith(start) for start in wanted)]
    # A failing example need not be made small.
    settings.register_profile("mutation", phases=(Phase.explicit, Phase.generate), database=None, deadline=None)
    settings.load_profile("mutation")
    files = [f"tests/{file}" for file in TESTS[module]]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open("pytest.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)  # what pytest prints, in every fork
    set_mutant_under_test("stats")
    mutants = Mutants(module, mutated.code, names, files, out, seconds)
    if pytest.main([*OPTIONS, "-k", selection, *files], plugins=[mutants]):
        log = Path("pytest.log").read_text(encoding="utf-8")
        sys.exit(f"{log[-5000:]}\n{module}: {' '.join(files)} must pass before mutants mean anything")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=list(TESTS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=60, help="the most that the tests of one mutant may take")
    parser.add_argument("-k", default="", help="which tests to use, as pytest's -k")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        run_mutants(args.here, args.names, args.seconds, args.k)
        return
    for module in TESTS:
        wanted = [name for name in args.names if f"{name}.".startswith(f"{module}.")]
        if wanted:
            with tempfile.TemporaryDirectory() as folder:
                for name in ("minigen", "tests", "benchmarks"):
                    shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
                for name in ("pyproject.toml", "README.md"):
                    shutil.copy(ROOT / name, folder)
                Path(folder, "weights").symlink_to(ROOT / "weights")
                arguments = ["--here", module, "--seconds", str(args.seconds), "-k", args.k, *wanted]
                subprocess.run([sys.executable, "-m", "tests.mutation", *arguments], cwd=folder)


if __name__ == "__main__":
    main()
