"""`quantplug` and `python -m quantplug`: the command line, which Ctrl-C also ends quietly while it is being read."""

import sys


def main() -> None:
    """Runs the command line."""
    try:
        from quantplug.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
