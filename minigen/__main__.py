"""The command, as `minigen` or as `python -m minigen`: what a signal does while the modules are imported."""

import os
import signal


def main():
    """The console entry point; returns the exit code."""
    # The imports take half a second. There is no text yet to show and no file to tidy up, so a signal just ends it;
    # an exception would be a traceback, or get lost in a module that is being set up. cli.main has its own handlers.
    for number, untouched in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) == untouched:
            signal.signal(number, lambda number, _: os._exit(128 + number))
    from minigen import cli

    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
