"""The suite is run from the root of the repository, which is where its package is found."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
