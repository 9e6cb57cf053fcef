"""``python -m hotloop``, the same as ``hotloop``."""

from hotloop.cli import main

if __name__ == "__main__":
    main()
