"""The suite is run from the root of the repository, where its package is found; scripts import their neighbours."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "benchmarks"))
