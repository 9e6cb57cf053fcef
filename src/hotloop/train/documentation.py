"""Makes the site's page of the settings from the commented YAML groups and the types."""

from __future__ import annotations

import functools
import json
import re
from importlib import resources
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

- Values are written as in Hydra. Quote text with special signs, `'data.delimiter=";"'`. Lists are `[16,32]`,
  mappings `{base: inductor, options: {shape_padding: true}}`, nothing is `null`.
  `${run.seed}` is the value of another setting; `~hpo.space.model` takes an entry out of a mapping.
- A recipe has only the settings that it reads: `recipe=digits data.path=x` is an error. The column `recipes`
  names the recipes that have a setting, unless all have it. `shipped` stands for all that come with hotloop,
  `workload` for a program of your own, `lightning` for a LightningModule.
- The error for a wrong name has the nearest names, the error for a wrong value what was expected.
- `--config FILE` takes a YAML file, such as the `settings.yaml` in a run's folder. The command line wins over the
  file, and the file over these defaults. A group with a text there is a choice (`data: csv`). `--config FOLDER`
  takes a folder with groups of your own, such as `training/long.yaml`, as further choices.
- `program.NAME=VALUE` sets a parameter of a program of your own ([its settings](../how-to/program-settings.md));
  `hotloop train FILE.py:make --help` lists them.
- `--show` prints the settings of a command. `hotloop settings recipe=NAME` (or `FILE.py:make`) lists
  all settings with their values.
- `hotloop settings --schema recipe=NAME > schema.json` writes JSON Schema. With the first line
  `# yaml-language-server: $schema=schema.json` in a file for `--config`, editors complete its settings, explain
  them, and mark mistakes.
- `hotloop train run.resume=FOLDER` goes on with an interrupted run. Further settings change its own, as
  far as [they may change](#when-a-run-is-resumed).
- `hotloop kfold` is `hotloop train kfold.n_splits=5`: a cross-validation ([kfold.md](../how-to/kfold.md)).
- `hotloop eval run=FOLDER` (or `checkpoint=FILE`) judges a checkpoint on the validation side of its data.
"""


def render() -> str:
    """Return the whole page."""
    order = list(Settings.model_fields)
    choices = conf_files.groups()
    parts = [HEAD]
    for group, names in sorted(choices.items(), key=lambda item: order.index(item[0])):
        parts.append(_section(group, names))
    return _linked("\n".join([*parts, *_resumed()]))


def rows(settings: Settings) -> Iterator[tuple[str, str, str, str]]:
    """Yield each setting: its name, its value as it is written in YAML, what it may be, and what it is for."""
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


def _linked(text: str) -> str:
    """Turn the names of pages (docs/how-to/focus.md) into links of this page."""
    return re.sub(r"docs/((?:how-to|evidence)/[a-z-]+\.md)(#[a-z-]+)?", r"[\1](../\1\2)", text)


def _resumed() -> list[str]:
    """Say which settings may change when a run is resumed."""

    def named(names: Iterable[str]) -> str:
        return ", ".join(f"`{one}`" for one in names)

    rows = [(named(names), f"no: {why}") for why, names in start.FIXED.items()]
    rows += [
        (named(start.COMPARED), "as long as the data stay the same: they are compared, and other data are refused"),
        (named(start.FREE), "yes: what is drawn and written of a model, and how much memory a step takes"),
        (
            "all others: `training`, `compile`, and of `run` the device and the logger",
            "yes; the sizes of a folder's pictures follow from `training.batch_size`, and are compared with the data",
        ),
        ("`run.folder`, `run.resume`", "they say which run it is"),
    ]
    return [
        "## When a run is resumed",
        "",
        "`hotloop train run.resume=FOLDER NAME=VALUE ...`. A group stands for what is in it and has no row of its own.",
        "A run that stopped before its first checkpoint takes any. Cross-validations: [kfold.md](../how-to/kfold.md).",
        "",
        "| setting | may change |",
        "|---|---|",
        *(f"| {what} | {may} |" for what, may in rows),
        "",
        "`hotloop eval` and `hotloop predict` refuse the same, but for `run.devices`, the optimizer and the goal.",
        "Another `data.path` or `pictures.path` may be judged, and a program's settings that are text, which may name",
        "data, may change; `predict` takes `data.columns` and `data.delimiter`.",
        "",
    ]


def _section(group: str, names: list[str]) -> str:
    others = [name for name in names if name != "default"]
    lines = [f"## {group}", ""]
    if others:
        lines += [f"Choices: {', '.join(f'`{group}={name}`' for name in others)}.", ""]
    for name in others:
        lines += _choice(group, name, described="default" in names)
    if "default" in names:
        lines += _rows(group, "default")
    return "\n".join(lines)


def _choice(group: str, name: str, *, described: bool) -> list[str]:
    """Say what a choice is for and, where the group's default file describes the settings, what it sets."""
    text, about = _read(group, name), _about(group, name)
    if not described:
        return [about, "", *_rows(group, name)]
    within = "" if "@package _global_" in text else f"{group}."
    values = (one for one in conf_files.entries(text) if one.value and not one.name.startswith("defaults"))
    sets = ", ".join(f"`{within}{one.name}={one.value}`" for one in values)
    return [f"- `{group}={name}`: {about}{f' Sets {sets}.' if sets else ''}", ""]


def _about(group: str, name: str) -> str:
    """Return the comment of a file that is of the whole of it."""
    above = (line for line in _read(group, name).splitlines() if line.startswith("#") and "@package" not in line)
    return " ".join(line.lstrip("# ") for line in above)


def _rows(group: str, name: str) -> list[str]:
    rows = ["| setting | default | takes | recipes | what it is for |", "|---|---|---|---|---|"]
    if not any(conf_files.entries(_read(group, name))):  # the settings are the user's
        rows.append(f"| `{group}.<name>` | | any value | {_recipes(group)} | {_about(group, name)} |")
    for entry in conf_files.entries(_read(group, name)):
        path = f"{group}.{entry.name}"
        setting = schema.at(Settings, path)
        if setting and setting.is_group:
            continue
        takes = setting.takes if setting else ""
        if entry.value:
            cells = (f"`{path}`", f"`{entry.value}`", takes, _recipes(path), entry.comment)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        elif entry.comment:
            rows.append(f"| `{path}.<name>` | | {takes} | {_recipes(path)} | {entry.comment} |")
    return [*rows, ""]


def _recipes(path: str) -> str:
    """Name the recipes that have a setting, or that can search it; empty where all can."""
    bare = re.sub(r"^hpo\.(trial|space)\.", "", path)
    found = [one for one in RECIPES if has(one, bare)]
    if len(found) == len(RECIPES):
        return ""
    own = [one for one in RECIPES if has(one, GROUP)]  # whose program is the user's
    if set(RECIPES) - set(own) <= set(found):
        found = ["shipped", *(one for one in found if one in own)]
    return ", ".join(found)


def _read(group: str, name: str) -> str:
    return (resources.files("hotloop.train") / "conf" / group / f"{name}.yaml").read_text(encoding="utf-8")
