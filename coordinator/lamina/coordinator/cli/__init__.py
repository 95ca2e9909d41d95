"""`coordinator`: commands. Flags and environment become frozen settings here, errors become one line."""

import sys


def main() -> None:
    """Entry point. Loading the commands takes a second, in which Ctrl-C must not end in a traceback either."""
    try:
        from lamina.coordinator.cli.app import main as run_app
    except KeyboardInterrupt:
        sys.exit(130)
    run_app()
