"""The simulator lies beside the tests and is a script as well, so it is found by its folder."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
