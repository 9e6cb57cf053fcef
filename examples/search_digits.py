"""500 cheap trials of a user's own program, in ten lines: rate and width of `digits.py`, three epochs each.

The same on the command line:

hotloop hpo_fast examples/digits.py:make recipe.goal=max:accuracy hpo.n_trials=500
"""

import sys
from pathlib import Path

from hotloop.cli import main

SEARCH = [
    "hpo_fast",
    f"{Path(__file__).with_name('digits.py')}:make",
    "recipe.goal=max:accuracy",
    "hpo.n_trials=500",
    "hpo.workers=2",
    "hpo.space.program.dropout={float: [0, 0.5], step: 0.1}",
    "hpo.enqueue=[{program.lr: 3e-3, program.width: 64, program.dropout: 0.1}]",  # known to be good: tried first
]

if __name__ == "__main__":
    main([*SEARCH, *sys.argv[1:]])
