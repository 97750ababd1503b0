"""Interactive mode (-i): read a line, let the model continue the text, read the next line."""

import contextlib
import locale
import os
import re
import sys

from minigen.command import signals
from minigen.command.arguments import MAX_BYTES, UTF_16, decode_file, drop_newline
from minigen.command.output import is_terminal, print_error, print_logprobs, print_stderr, print_texts

HELP = (
    "Type a line and the model continues the text. Enter on an empty line: go on. /new: start a new text. "
    "/help: this help.\n/quit or Ctrl-D: leave. Ctrl-C: stop the text."
)


def _prepare_terminal():
    """Let `input` edit lines and remember them."""
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    with contextlib.suppress(ImportError, AttributeError):  # Windows has neither
        if locale.nl_langinfo(locale.CODESET) != "UTF-8":
            os.environ["LC_ALL"] = "C.UTF-8"  # readline would drop characters that the locale does not have
        import readline  # noqa: F401


def _read_line():
    """The next line of stdin, without its end. Raises EOFError if there is none."""
    if sys.stdin is None:
        raise EOFError
    if is_terminal(sys.stdin) and is_terminal(sys.stdout):
        return input("> ")  # with readline, if that was imported
    if is_terminal(sys.stdin):
        print_stderr("> ", end="")
    line = sys.stdin.buffer.readline(MAX_BYTES)
    if not line:
        raise EOFError
    if line.startswith(UTF_16):
        raise OSError("stdin is UTF-16; interactive mode reads lines of UTF-8: convert it first")
    return drop_newline(decode_file(line))


def _run_turn(session, text, style):
    """Continue the text with a line, and print what the model adds."""
    (done,) = print_texts(session.turn(text), [text], session.seed, style)
    if done.logprobs is not None and not style.json:
        print_logprobs([done], only_unlikely=False)
    if done.finish_reason == "context":
        print_stderr(
            f"the text fills the model's context of {session.model.config.n_positions} tokens: /new starts a new text, "
            "--context-shift goes on"
        )


def run_interactive(session, prompts, style, quiet, describe):
    """Read lines until stdin ends, and print how the model continues each; return the exit code.

    prompts: the first turns. describe: an error -> its message. A turn that fails prints an error and leaves the
    session unchanged. If nobody is typing, a failed turn makes the exit code 2, and Ctrl-C ends the run.
    """
    typed = is_terminal(sys.stdin)
    if typed:
        _prepare_terminal()
        if not quiet:
            print_stderr(HELP)
    prompts, stopped, failed = list(prompts), False, False
    while True:
        is_prompt = bool(prompts)
        try:
            text = prompts.pop(0) if prompts else _read_line()
        except EOFError:
            if typed:
                print_stderr("")  # the shell's own prompt gets a line of its own
            break
        except KeyboardInterrupt:
            if stopped or not typed:
                raise
            stopped = True
            print_stderr("\nCtrl-C again leaves, as Ctrl-D does")
            signals.raise_on_next_signal()
            continue
        stopped = False
        command = None if is_prompt else re.match(r"/\w*(?=\s|$)|(?:quit|exit)\s*$", text)
        try:
            if command is None:
                _run_turn(session, text, style._replace(echo=style.echo and (is_prompt or not typed)))
            elif command[0].strip() in ("/quit", "/exit", "quit", "exit"):
                break
            elif command[0] == "/help":
                print_stderr(HELP)
            elif command[0] == "/new":
                session.context = []
                session.seed += 1  # or the same first line would give the same text again
                if typed:
                    print_stderr("a new text begins")
            else:
                raise ValueError(
                    f"there is no command {command[0]}: /help lists them (a space in front makes the line a text)"
                )
        except ValueError as error:
            failed = True
            print_error(describe(error))
        except KeyboardInterrupt:
            if not typed:
                raise
            signals.raise_on_next_signal()  # Ctrl-C ended this turn; the next one follows
    return 2 if failed and not typed else 0
