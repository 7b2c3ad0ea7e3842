"""The entry point: ``python -m modelwright`` is ``modelwright``."""

import sys


def main() -> None:
    """Run the command; Ctrl-C before it handles signals is no traceback."""
    try:
        from modelwright.cli.main import main as run_command

        run_command()
    except KeyboardInterrupt:
        from modelwright.errors import Interrupted

        print("stopped", file=sys.stderr)
        sys.exit(Interrupted.exit_code)


if __name__ == "__main__":
    main()
