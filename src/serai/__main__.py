"""``python -m serai`` is the same program as ``serai``."""

from serai.cli.main import main

if __name__ == "__main__":
    main()
