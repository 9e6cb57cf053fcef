"""Makes the site's page of the settings from the commented YAML groups and the types."""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

from hotloop.train import conf_files, configure, program, schema, start
from hotloop.train.scope import RECIPES, has
from hotloop.train.settings import GROUP, Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HEAD = """# Settings of `hotloop train`

Change a setting by its name. Choose a file of a group by the group's name:

```
hotloop train training.num_epochs=3 training.optimization.use_torch_compile=true
hotloop train data=csv data.path=pairs.csv model=bge-reranker
hotloop train train.py:make program.lr=3e-4
```

- Values are written as in YAML: lists are `[16,32]`, mappings `{base: inductor, options: {shape_padding: true}}`,
  nothing is `null`. `${run.seed}` is the value of another setting; `~hpo.space.model` takes an entry out of a mapping.
- A recipe has only the settings that it reads: `recipe=digits data.path=x` is an error. The column `recipes` names the
  recipes that have a setting, unless all have it. `workload` stands for a program of your own.
- `--config FILE` takes a YAML file, such as the `settings.yaml` in a run's folder. The command line wins over the
  file, and the file over these defaults. `--config FOLDER` takes a folder with groups of your own.
- `program.NAME=VALUE` sets a parameter of a program of your own ([its settings](../how-to/program-settings.md));
  `hotloop train FILE.py:make --help` lists them.
- `--show` prints the settings of a command. `hotloop settings recipe=NAME` (or `FILE.py:make`) lists all settings with
  their values; `--schema` writes JSON Schema, by which editors complete a file for `--config`.
- `hotloop train run.resume=FOLDER` goes on with an interrupted run. Further settings change its own, as far as
  [they may change](#when-a-run-is-resumed).
- `hotloop kfold` is `hotloop train kfold.n_splits=5`: a cross-validation ([kfold.md](../how-to/kfold.md)).
- `hotloop eval run=FOLDER` (or `checkpoint=FILE`) judges a checkpoint on the validation side of its data.
"""


def render() -> str:
    """Return the whole page."""
    parts, choices = [HEAD], conf_files.groups()
    for group in (one for one in Settings.model_fields if one in choices):
        others = [f"`{group}={name}`" for name in choices[group] if name != "default"]
        parts += [f"## {group}", "", *([f"Choices: {', '.join(others)}.", ""] if others else [])]
        parts += ["| setting | default | takes | recipes | what it is for |", "|---|---|---|---|---|"]
        parts += [*_rows(group), ""]
    text = "\n".join([*parts, *_resumed()])
    return re.sub(r"docs/((?:how-to|evidence)/[a-z-]+\.md)(#[a-z-]+)?", r"[\1](../\1\2)", text)


def rows(settings: Settings) -> Iterator[tuple[str, str, str, str]]:
    """Yield each setting: its name, its value as it is written in YAML, its type, and what it is for."""
    values, model = configure.to_dict(settings), type(settings)
    for name in schema.names(model):
        setting = schema.at(model, name)
        if setting and not setting.is_group and name != GROUP:
            value: Any = functools.reduce(lambda at, part: at[part], name.split("."), values)
            yield name, json.dumps(value), setting.takes, conf_files.comments().get(name, "")


def json_schema(settings: Settings) -> dict[str, Any]:
    """Return the JSON Schema of a file for ``--config``, for the recipe, or the program, of some settings."""
    found = type(settings).model_json_schema()
    found["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    if GROUP in found["properties"] and ":" in settings.recipe.name:
        own = program.known(settings.recipe.name).json_schema()
        found.setdefault("$defs", {}).update(own.pop("$defs", {}))
        found["properties"][GROUP] = own
    choices = conf_files.groups()
    for group, given in found["properties"].items():  # text is a choice
        found["properties"][group] = {"anyOf": [given, {"enum": choices[group]}]}
    return found


def _rows(group: str) -> Iterator[str]:
    usual = conf_files.own(group, "default") if "default" in conf_files.groups()[group] else {}
    for name in schema.names(Settings):
        setting = schema.at(Settings, name)
        if setting and not setting.is_group and (name == group or name.startswith(f"{group}.")):
            value: Any = usual
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            owners = [one for one in RECIPES if has(one, name)]
            recipes = "" if len(owners) == len(RECIPES) else ", ".join(owners)
            cells = (f"`{name}`", f"`{json.dumps(value)}`", setting.takes, recipes, conf_files.comments().get(name, ""))
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _resumed() -> list[str]:
    """Return the section that says which settings may change when a run is resumed."""

    def named(names: Iterable[str]) -> str:
        return ", ".join(f"`{one}`" for one in names)

    rows = [(named(names), f"no: {why}") for why, names in start.FIXED.items()]
    rows += [
        (named(start.COMPARED), "as long as the data stay the same: they are compared, and other data are refused"),
        (named(start.FREE), "yes: samples, and how much memory a step takes"),
        ("all others: `training`, `compile`, and of `run` the device and the logger", "yes"),
        ("`run.folder`, `run.resume`", "they say which run it is"),
    ]
    return [
        "## When a run is resumed",
        "",
        "`hotloop train run.resume=FOLDER NAME=VALUE ...`. A group stands for its settings without a row of their own.",
        "A run that stopped before its first checkpoint takes any. Cross-validations: [kfold.md](../how-to/kfold.md).",
        "",
        "| setting | may change |",
        "|---|---|",
        *(f"| {names} | {may} |" for names, may in rows),
        "",
        "`hotloop eval` refuses the same, but for `run.devices`, the optimizer and the goal. Another `data.path` or",
        "`pictures.path` may be judged, and a program's settings that are text, which may name data, may change.",
        "",
    ]
