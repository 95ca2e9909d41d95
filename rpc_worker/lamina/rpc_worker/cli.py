"""Entry point of `rpc-worker`, and of `python -m lamina.rpc_worker.cli`."""

import sys


def main() -> None:
    """Loading the command takes a second, in which Ctrl-C must not end in a traceback either."""
    try:
        from lamina.rpc_worker.command import main as run_command
    except KeyboardInterrupt:
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    main()
