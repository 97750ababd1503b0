"""What Ctrl-C (SIGINT) and SIGTERM do at each stage of the command."""

import contextlib
import os
import signal
import threading

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def _handle(handler):
    """Let both signals call `handler`. One that whoever started the process had it ignore stays ignored."""
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for number in NUMBERS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)


def exit_immediately():
    """From now on a signal ends the process, with no `finally` and nothing shown."""
    _handle(lambda number, _: os._exit(128 + number))


def swallow_signals():
    """From now on signals are ignored: what is left to do takes a moment."""
    _handle(lambda number, _: None)


def raise_on_next_signal():
    """The next signal raises KeyboardInterrupt or SystemExit, so that every `finally` has its turn.

    Those after it do nothing, or they would interrupt that; until this is called again.
    """

    def handler(number, _):
        swallow_signals()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    _handle(handler)


def ignore():
    """For the rest of the process: Python's shutdown would otherwise hand them back to the system, which ends it."""
    _handle(signal.SIG_IGN)


@contextlib.contextmanager
def restored():
    """Afterwards the handlers are those from before."""
    before = [signal.getsignal(number) for number in NUMBERS]
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in zip(NUMBERS, before, strict=True):
                signal.signal(number, handler)
