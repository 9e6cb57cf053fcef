"""Optuna's own plots of a search, made by a process of its own: ``python -m hotloop.ui.study_plots FOLDER``.

The study is made again in memory from the search's document. Its storage is not opened: a runs folder may come from a
stranger, and a storage is an address. Prints a list of titles and figures as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.report import study
from hotloop.report.text import line, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import optuna

PLOTS = {
    "plot_optimization_history": "History", "plot_intermediate_values": "Intermediate values",
    "plot_parallel_coordinate": "Parallel coordinates", "plot_slice": "Slices",
    "plot_param_importances": "Importance", "plot_contour": "Pairs of settings",
}  # fmt: skip
_PAIRS = 4
"""Settings whose pairs are drawn at most, the most important first: their number grows by the square."""
_FEWEST = 2
"""Complete trials that a plot of settings needs."""


def main(folder: Path) -> None:
    """Print the figures of a search."""
    import optuna  # noqa: PLC0415 - optional, and not in the server

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    document = study.SCHEMA.load(folder)
    made = again(document)
    print(json.dumps([*_figures(made, _shown(document.get("metric")))]))  # noqa: T201 - its answer


def again(document: Mapping[str, Any]) -> optuna.Study:
    """Return the study of a document, in memory; trials that cannot be read are left out."""
    import optuna  # noqa: PLC0415 - optional, and not in the server

    found = optuna.create_study(direction="minimize" if document.get("direction") == "minimize" else "maximize")
    for attempt in document["trials"]:
        if isinstance(attempt, dict) and (trial := _trial(attempt, document.get("space"))):
            found.add_trial(trial)
    return found


def _trial(attempt: Mapping[str, Any], space: Any) -> optuna.trial.FrozenTrial | None:
    from optuna.trial import TrialState, create_trial  # noqa: PLC0415

    states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    state, value = states.get(str(attempt.get("state"))), number(attempt.get("value"))
    values, reports = attempt.get("values"), attempt.get("reports")
    if state is None or not isinstance(values, dict) or (state == TrialState.COMPLETE and value is None):
        return None
    known = {name: given for name, given in values.items() if isinstance(space, dict) and name in space}
    distributions = {name: _distribution(space[name], given) for name, given in known.items()}
    curve = {
        int(step): float(one)
        for step, one in (each for each in reports or () if isinstance(each, list) and len(each) == 2)  # noqa: PLR2004
        if isinstance(step, int) and number(one) is not None
    }
    return create_trial(
        state=state,
        value=value if state == TrialState.COMPLETE else None,
        params={_shown(name): _plain(given) for name, given in known.items()},
        distributions={_shown(name): one for name, one in distributions.items()},
        intermediate_values=curve,
    )


def _distribution(about: Any, given: Any) -> optuna.distributions.BaseDistribution:
    """Return where a value came from: a range if the document tells of one that holds it, else its choices."""
    from optuna import distributions  # noqa: PLC0415

    about = about if isinstance(about, dict) else {}
    told = about.get("values")
    values = told if isinstance(told, list) else []
    ends = [end for one in values if (end := number(one)) is not None]
    if about.get("kind") != "choices" and number(given) is not None and len(ends) == 2 and ends[0] <= given <= ends[1]:  # noqa: PLR2004
        log = about.get("kind") == "log" and ends[0] > 0
        if all(isinstance(one, int) for one in (*values, given)):
            return distributions.IntDistribution(int(ends[0]), int(ends[1]), log=log)
        return distributions.FloatDistribution(ends[0], ends[1], log=log)
    return distributions.CategoricalDistribution(tuple(dict.fromkeys(map(_plain, [*values, given]))))


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else _shown(value)


def _shown(value: Any) -> str:
    """Return text without what Plotly would read as markup."""
    return line(value, 80).replace("<", "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}")


def _figures(found: optuna.Study, metric: str) -> Iterator[dict[str, Any]]:
    import optuna  # noqa: PLC0415

    complete = [one for one in found.trials if one.state == optuna.trial.TrialState.COMPLETE]
    varied = len(complete) >= _FEWEST and len({one.value for one in complete}) > 1
    if not found.trials:
        return
    names = [*optuna.importance.get_param_importances(found)] if varied else []
    for name, title in PLOTS.items():
        if not varied and name not in ("plot_optimization_history", "plot_intermediate_values"):
            continue
        if name == "plot_contour" and len(names) < 2:  # noqa: PLR2004 - a pair
            continue
        chosen: dict[str, Any] = {"params": names[:_PAIRS]} if name == "plot_contour" else {}
        named = {} if name == "plot_intermediate_values" else {"target_name": metric}
        figure = json.loads(getattr(optuna.visualization, name)(found, **chosen, **named).to_json())
        figure["layout"].pop("template", None)  # the page has colours of its own, light and dark
        figure["layout"].pop("title", None)
        if figure["data"]:
            yield {"title": title, "data": figure["data"], "layout": figure["layout"]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
