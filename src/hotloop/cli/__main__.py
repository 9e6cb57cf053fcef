"""``python -m hotloop.cli``, the same as ``python -m hotloop`` and ``hotloop``."""

from hotloop.cli import main

if __name__ == "__main__":
    main()
