"""The command: continues texts, scores one, or reads turns. Exit codes are in `main`.

python -m minigen "Once upon a time" --temperature 0.8 --seed 1
"""

import os
import sys
import warnings
from functools import partial

import minigen
from minigen.api import load, stream
from minigen.command import arguments, output, signals
from minigen.command.arguments import read_prompts
from minigen.command.colors import has_colours, legend
from minigen.command.interactive import run_interactive
from minigen.command.output import print_error, print_stderr
from minigen.command.score import run_score
from minigen.engine.validation import short_repr
from minigen.files.hub import DEFAULT_MODEL, default_draft, resolve_checkpoint
from minigen.options import OptionError, check_options, require
from minigen.session import Session
from minigen.tracing.page import check_file, stream_with_trace


def _check_trace(trace, used):
    """Raise OptionError if the trace would overwrite one of the paths in `used`, (path, what it is)."""
    for path, name in used:
        if path is not None and os.path.realpath(path) == os.path.realpath(trace):
            raise OptionError(f"{{trace}} is {{0}}, which is also {name}: name another file", trace)


def _show_value(value):
    """A value in an error message; a switch was typed without one."""
    return "given" if isinstance(value, bool) else short_repr(value)


def run(args, options, typed):
    """Read the prompts, load the models, print the continuations; return the exit code."""
    if args.help or args.version:
        output.write(arguments.help_page() if args.help else f"minigen {minigen.__version__}\n")
        return 0
    if args.score is not None:
        if typed.prompts:
            raise OptionError("the prompt is {0}, but {score} generates nothing: leave it out", typed.prompts[0])
        return run_score(args, options)

    # What needs no model is checked before one is loaded.
    draft_name = args.draft_model
    if args.speculative and draft_name is None:
        draft_name = default_draft(args.model)
    cached = args.prompt_cache is not None
    if args.show_probs:
        options = {"logprobs": 3} | options
    decoding = check_options(options, drafts=draft_name is not None, cached=cached).decoding
    options = options | {"seed": decoding.seed}
    if args.trace is not None:
        check_file(args.trace)
        inputs = ("prompt_cache", "file", "prompts_file")
        files = [(getattr(args, name), f"{{{name}}}") for name in inputs]
        _check_trace(args.trace, [*files, ("/dev/stdout", "the standard output")])
    prompts = read_prompts(args, typed.prompts)
    if args.interactive:
        require(len(prompts) < 2, "the number of prompts", len(prompts), "1 or none with {interactive}")

    name = DEFAULT_MODEL if args.model is None else args.model
    folder = resolve_checkpoint(args.model)
    if args.trace is not None:
        _check_trace(args.trace, [(entry.path, "a file of the model") for entry in os.scandir(folder)])
    model, tokenizer = load(folder)
    draft_model = None if draft_name is None else load(draft_name)
    coloured = args.show_probs and has_colours(sys.stdout)
    style = output.Format(name, args.json, args.no_stream, not args.no_echo, tokenizer if coloured else None)
    header = output.header(name, folder, model, draft_name, options)
    # Up to here a signal ends the process, as `__main__` says: an exception would wait for a download's threads.
    signals.raise_on_next_signal()

    if args.interactive:
        session = Session(model, tokenizer, draft_model=draft_model, **options)
        if not args.quiet:
            print_stderr(header)
        return run_interactive(session, prompts, style, args.quiet, partial(_describe, typed.flags))

    start = stream if args.trace is None else partial(stream_with_trace, file=args.trace, names=(name, draft_name))
    steps = start(model, tokenizer, prompts, draft_model=draft_model, cache=args.prompt_cache, **options)
    if not args.quiet:
        print_stderr(header)
        if any(prompt.endswith(" ") for prompt in prompts):
            print_stderr(
                "hint: the prompt ends with a space; GPT-2's tokens include the space in front of a word, "
                "so prompts work better without a trailing one"
            )
        if coloured and has_colours(sys.stderr):
            print_stderr(legend())
    n = decoding.num_return_sequences
    try:
        completions = output.print_texts(steps, [prompt for prompt in prompts for _ in range(n)], decoding.seed, style)
    finally:
        if args.trace is not None and steps.written and not args.quiet:
            print_stderr(steps.written)
    if decoding.logprobs is not None or args.show_probs:
        if not args.json:
            output.print_logprobs(completions, only_unlikely="logprobs" not in typed.texts)
    if not args.quiet:
        print_stderr(output.closing_line(completions, args.prompt_cache))
        if any(done.finish_reason == "context" for done in completions):
            n_positions = model.config.n_positions
            print_stderr(f"the text fills the model's context of {n_positions} tokens; --context-shift goes on")
    return 0


def _describe(flags, error):
    """The message of an error, with options named by their flags."""
    if isinstance(error, OptionError):
        return error.render(flags, _show_value)
    if isinstance(error, MemoryError):
        return f"there is not enough memory for this ({str(error) or 'none left'}); ask for fewer or shorter texts"
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    # Raised by Python, without a sentence. Only a relative path in a deleted working directory has no file name.
    return f"cannot open {error.filename or 'the working directory'}: {error.strerror}"


def main(argv=None):
    """Run a command line, by default that of the process; return the exit code.

    0, or 2 if what was asked cannot be done, 130 after Ctrl-C, 141 after the reader of a pipe has left. SIGTERM raises
    SystemExit with 143.
    """
    flags = arguments.FLAGS
    warnings.showwarning = lambda message, *_, **__: print_error(f"warning: {message}")
    with signals.preserve_handlers():
        try:
            typed = arguments.parse(sys.argv[1:] if argv is None else list(argv))
            flags = typed.flags
            return run(*arguments.read_options(typed), typed)
        except BrokenPipeError:
            return 141  # the reader has left, as head does
        except KeyboardInterrupt:
            return 130
        except (MemoryError, OSError, ValueError) as error:
            print_error(_describe(flags, error))
            return 2
        finally:
            signals.swallow_signals()
