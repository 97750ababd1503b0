"""stdout and stderr that are full, slow, never ready or closed: all of the output arrives, or the exit code says no.

Each command runs in a forked child, where it has real file descriptors but nothing to import. A first run with two
ordinary pipes gives what a second run, with other streams, must write.
"""

import contextlib
import io
import json
import os
import re
import select
import signal
import sys
import time
import traceback
import warnings

with contextlib.suppress(ImportError):  # POSIX has them
    import fcntl
    import resource
    import tty

from minigen.__main__ import main
from tests.fuzz.common import Run, require, still_clock, write

SECONDS = 15  # after which a child kills itself: less than the runner waits for an input
PIPE_SIZE = 4096  # the smallest that Linux has
# What a stream may be: a name -> how often it is chosen.
FORMS = {"pipe": 3, "slow": 3, "non-blocking": 3, "closed": 3, "limited": 3, "full": 1, "missing": 1, "terminal": 1}
LOSSLESS = ("pipe", "slow", "non-blocking", "terminal")  # all of the output must arrive
FILES = {
    "prompts": b"The fox\n\nOnce\xff upon\n" * 10,
    "text": b"Once upon a time there was a fox, caf\xc3\xa9. " * 6,
    "turns": b"The fox\n\n/new\nOnce\n/nothing\n" * 3 + b"a" * 80 + b"\nthe end",
}
COMMANDS = [
    ["The fox", "-n", "40"],
    ["The fox", "-n", "9", "--num-return-sequences", "12", "--json", "--logprobs", "2"],
    ["The fox", "-n", "20", "--num-return-sequences", "9"],
    ["The fox", "Once", "-n", "30", "--num-beams", "3", "--logprobs", "1"],
    ["--prompts-file", "prompts", "-n", "9"],
    ["--prompts-file", "prompts", "-n", "5", "--json"],
    ["--prompts-file", "prompts", "-n", "5", "--show-probs"],
    ["The fox", "-n", "40", "--show-probs", "--temp", "2"],
    ["--score", "text", "--logprobs", "0"],
    ["--score", "text", "--logprobs", "0", "--json"],
    ["--score", "text"],
    ["-i", "-n", "6"],
    ["-i", "-n", "6", "--json"],
    ["-i", "-n", "6", "--logprobs", "2"],
    ["--help"],
    ["--version"],
    ["The fox", "--top-p", "2"],
]


class Pipe:
    """The reading end of a stream of the child, which reads as the form of the stream says."""

    def __init__(self, form, size, rng):
        self.form, self.data, self.open = form, b"", form not in ("limited", "full", "missing")
        self.most = rng.randrange(size + 2) if form == "closed" else None  # bytes after which the reader leaves
        self.pauses = rng.choices([0, 0.001, 0.02], k=4) if form in ("slow", "non-blocking") else []
        self.chunk = rng.choice([700, PIPE_SIZE, 2**16])
        self.reader = self.writer = None
        if form == "terminal":
            self.reader, self.writer = os.openpty()
            tty.setraw(self.writer)
        elif self.open:
            self.reader, self.writer = os.pipe()
            if form != "pipe":
                fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
            os.set_blocking(self.writer, form != "non-blocking")

    def into(self, number, path):
        """In the child: make the stream its file descriptor `number`."""
        if self.form == "missing":
            os.close(number)
            return
        if self.open:
            os.close(self.reader)  # or the pipe would still have a reader when the parent has closed its end
        else:
            self.writer = os.open("/dev/full" if self.form == "full" else path, os.O_WRONLY | os.O_CREAT)
        os.dup2(self.writer, number)
        os.close(self.writer)

    def read(self):
        """Read once, and close the reader at the end, or if it has enough."""
        time.sleep(self.pauses.pop() if self.pauses else 0)
        size = self.chunk if self.most is None else min(self.chunk, self.most - len(self.data))
        try:
            data = os.read(self.reader, size) if size else b""
        except OSError:  # a terminal's way to say that its other end is closed
            data = b""
        self.data += data
        if not data:
            self.close()

    def close(self):
        os.close(self.reader)
        self.open = False


def python_stream(number, form, buffered):
    """What Python makes of a file descriptor when it starts, with and without PYTHONUNBUFFERED."""
    if form == "missing":
        return None
    if buffered:
        return open(number, "w", closefd=False)
    return io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True)


class Streams(Run):
    """The command with every kind of stdout and stderr."""

    def __init__(self, folder):
        super().__init__(folder)
        self.folder = folder
        self.known = {}  # (command line, which streams are terminals) -> (exit code, stdout, stderr)

    def start(self, argv, pipes, limit, buffered):
        """(exit code, traceback or ""): a child runs the command, and `pipes`, its stdout and stderr, are read."""
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                code = self.run_child(argv, pipes, limit, buffered)
            except BaseException:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                os.write(tell, traceback.format_exc()[-4000:].encode())
            finally:
                os._exit(code)
        os.close(tell)
        for pipe in pipes:
            if pipe.writer is not None:
                os.close(pipe.writer)
        while reading := [pipe for pipe in pipes if pipe.open]:
            for pipe in reading:
                if pipe.most == len(pipe.data):
                    pipe.close()
            ready = select.select([pipe.reader for pipe in reading if pipe.open], [], [], 1)[0]
            for pipe in reading:
                if pipe.open and pipe.reader in ready:
                    pipe.read()
        with open(told, "rb") as file:
            trace = file.read().decode()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), trace

    def run_child(self, argv, pipes, limit, buffered):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does when it starts
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        warnings.resetwarnings()
        for number, pipe in enumerate(pipes, 1):
            pipe.into(number, self.folder / f"stream {number}")
        sys.stdin = open("turns")
        sys.stdout, sys.stderr = (python_stream(number, pipe.form, buffered) for number, pipe in enumerate(pipes, 1))
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        sys.argv = ["minigen", *argv]
        try:
            with still_clock():
                code = main()
        except SystemExit as exit:
            code = exit.code
        for stream in (sys.stdout, sys.stderr):  # Python does this at exit, where a failure changes the exit code
            if stream is not None:
                stream.flush()
        return code

    def expected(self, argv, terminals, rng):
        """(exit code, stdout, stderr) with streams that take all of it."""
        key = tuple(argv), terminals
        if key not in self.known:
            pipes = [Pipe("terminal" if terminal else "pipe", 0, rng) for terminal in terminals]
            code, trace = self.start(argv, pipes, None, True)
            require(not trace, f"with ordinary streams: {trace}")
            self.known[key] = code, *(pipe.data for pipe in pipes)
        return self.known[key]

    def run(self, rng):
        argv = ["--model", str(self.model), *rng.choice(COMMANDS)]
        if not {"--score", "--num-beams", "--help", "--version"} & set(argv):
            argv += ["-s", "1"]
        if "--score" not in argv:
            argv += rng.choice([[], ["-q"], ["--no-stream"], ["--no-echo"]])
        forms = rng.choices(list(FORMS), FORMS.values(), k=2)
        forms[rng.randrange(2)] = rng.choice([*forms, "pipe"])
        write(self.input, FILES)
        (self.input / "argv.json").write_text(json.dumps([argv, forms]))
        os.chdir(self.input)
        code, *wanted = self.expected(argv, tuple(form == "terminal" for form in forms), rng)
        limit = rng.randrange(max(map(len, wanted)) + 2) if "limited" in forms else None
        pipes = [Pipe(form, len(text), rng) for form, text in zip(forms, wanted, strict=True)]
        for number, pipe in enumerate(pipes, 1):
            if pipe.form == "limited":
                with contextlib.suppress(FileNotFoundError):
                    (self.folder / f"stream {number}").unlink()
        found, trace = self.start(argv, pipes, limit, rng.random() < 0.5)
        for number, pipe in enumerate(pipes, 1):
            if pipe.form == "limited":
                pipe.data = (self.folder / f"stream {number}").read_bytes()
        require(not trace, f"{forms}: {trace}")
        self.judge(code, wanted, found, pipes, limit)
        return f"exit {found}"

    def judge(self, code, wanted, found, pipes, limit):
        """Compare the exit code and what arrived with the first run's."""
        what = f"{[pipe.form for pipe in pipes]}, exit code {found} for {code}: {[pipe.data[-300:] for pipe in pipes]}"
        rooms = [
            {"closed": pipe.most, "limited": limit, "full": 0, "missing": 0}.get(pipe.form, len(text))
            for pipe, text in zip(pipes, wanted, strict=True)
        ]
        out, err = pipes
        require(out.data == wanted[0][: rooms[0]], f"stdout differs: {what}")
        lost, left = rooms[0] < len(wanted[0]), False
        if lost and out.form == "closed":
            # The last bytes may have been in the pipe when its reader left: the command cannot know.
            left = found == 141
            require(left or (found == code and len(wanted[0]) <= rooms[0] + PIPE_SIZE), what)
        else:
            require(found == (2 if lost else code), what)
            left = lost
        said = err.data
        if left and err.form in LOSSLESS:
            if out.form != "closed":
                sentence = re.fullmatch(rb"(.*\n)?minigen: cannot write to stdout: [^\n]+\n", said, re.DOTALL)
                require(sentence, f"no sentence: {what}")
                said = sentence[1] or b""
            require(wanted[1].startswith(said), f"stderr differs: {what}")
        elif not left:
            require(said == wanted[1][: rooms[1]], f"stderr differs: {what}")
