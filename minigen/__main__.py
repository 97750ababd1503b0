"""The command, as `minigen` or as `python -m minigen`: what a signal does until the first text is made."""

import os
import signal


def main():
    """The console entry point; returns the exit code."""
    # Imports take half a second, and a download minutes. There is no text yet to show and no file to tidy up, so a
    # signal just ends it: an exception would be a traceback, get lost in a module that is being set up, or wait for
    # threads.
    for number, untouched in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) == untouched:
            signal.signal(number, lambda number, _: os._exit(128 + number))
    from minigen import cli

    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
