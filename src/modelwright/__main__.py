"""``python -m modelwright`` is ``modelwright``."""

from modelwright.cli.main import main

if __name__ == "__main__":
    main()
