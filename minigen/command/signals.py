"""What Ctrl-C (SIGINT) and SIGTERM do at each stage of the command."""

# `__main__` imports this first, to have handlers early: only what Python has loaded by then is imported here.
import os
import signal

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def _set_handlers(handlers):
    """Set the handlers of both signals. A signal that was ignored when the process started stays ignored."""
    for number, handler in zip(NUMBERS, handlers, strict=True):
        if signal.getsignal(number) != signal.SIG_IGN:
            try:
                signal.signal(number, handler)
            except ValueError:  # only the main thread may set handlers
                return


def exit_immediately():
    """From now on the signals terminate the process immediately: no cleanup, no traceback."""
    _set_handlers([lambda number, _: os._exit(128 + number)] * 2)


def swallow_signals():
    """From now on the signals do nothing. For what takes only a moment."""
    _set_handlers([lambda number, _: None] * 2)


def raise_on_next_signal():
    """The next signal raises KeyboardInterrupt or SystemExit, so that every `finally` runs.

    Later signals do nothing, so that they do not interrupt the cleanup, until this is called again.
    """

    def handler(number, _):
        swallow_signals()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    _set_handlers([handler] * 2)


def ignore_signals():
    """Ignore both signals until the process exits.

    Python restores the default handlers during its shutdown, and a late Ctrl-C would kill the process.
    """
    _set_handlers([signal.SIG_IGN] * 2)


class preserve_handlers:
    """Context manager: restores the handlers at its end. (contextlib would be one more import.)"""

    def __enter__(self):
        self.handlers = [signal.getsignal(number) for number in NUMBERS]

    def __exit__(self, *_):
        _set_handlers(self.handlers)
