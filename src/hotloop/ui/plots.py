"""Optuna's own plots of a search, as one page: ``python -m hotloop.ui.plots FOLDER`` prints it.

Only the study in the search's own folder is opened: a runs folder may come from a stranger, and another storage is an
address.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PLOTS = ("optimization_history", "intermediate_values", "parallel_coordinate", "slice", "param_importances")


def main(folder: Path) -> None:
    """Print the plots; one that Optuna cannot make of so few trials is left out."""
    import optuna  # noqa: PLC0415 - optional, and not in the server

    from hotloop.train.search.study import default_url  # noqa: PLC0415

    study = optuna.load_study(study_name=None, storage=default_url(folder))
    script: str | bool = True
    for name in _PLOTS:
        try:
            figure = getattr(optuna.visualization, f"plot_{name}")(study)
        except (ValueError, RuntimeError) as error:
            sys.stderr.write(f"{name}: {error}\n")
            continue
        sys.stdout.write(figure.to_html(full_html=False, include_plotlyjs=script))
        script = False


if __name__ == "__main__":
    main(Path(sys.argv[1]))
