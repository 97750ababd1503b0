"""The command, as `minigen` or as `python -m minigen`."""

from minigen.command import signals


def main():
    """The console entry point; returns the exit code."""
    # Imports take half a second, and a download minutes. Until the first text there is nothing to show and no file to
    # tidy up, so a signal terminates the process: an exception would print a traceback, get lost in a module that is
    # being imported, or wait for threads.
    signals.exit_immediately()
    from minigen.command import main as command

    try:
        return command.main()
    finally:
        signals.ignore_signals()


if __name__ == "__main__":
    raise SystemExit(main())
