"""The command, as `minigen` or as `python -m minigen`: what a signal does until the first text is made."""

from minigen.command import signals


def main():
    """The console entry point; returns the exit code."""
    # Imports take half a second, and a download minutes. There is no text yet to show and no file to tidy up, so a
    # signal just ends it: an exception would be a traceback, get lost in a module that is being set up, or wait for
    # threads.
    signals.exit_immediately()
    from minigen.command import main as command

    try:
        return command.main()
    finally:
        signals.ignore()


if __name__ == "__main__":
    raise SystemExit(main())
