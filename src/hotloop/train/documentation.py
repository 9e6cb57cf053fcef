"""The settings as a table: for ``hotloop settings``, for the site's page, and as JSON Schema for editors."""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

from hotloop.train import conf_files, configure, program, schema, start
from hotloop.train.scope import RECIPES, has
from hotloop.train.settings import GROUP, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = """# Settings of `hotloop train`

```
hotloop train training.num_epochs=3 training.optimization.use_torch_compile=true
hotloop train data=csv data.path=pairs.csv model=bge-reranker
hotloop train train.py:make program.lr=3e-4
```

- Values are written as in YAML: lists are `[16,32]`, mappings `{base: inductor, options: {shape_padding: true}}`,
  nothing is `null`. `${run.seed}` is the value of another setting.
- A recipe has only the settings that it reads: `hotloop settings recipe=NAME` (or `FILE.py:make`) lists them.
- `--config FILE` takes a YAML file, such as the `settings.yaml` in a run's folder. The command line wins over the
  file, and the file over these defaults.
- `program.NAME=VALUE` sets a parameter of a program of your own ([its settings](../how-to/program-settings.md)).
- `hotloop train run.resume=FOLDER NAME=VALUE ...` goes on with a run, and changes its settings but for these:
"""


def render() -> str:
    """Return the site's page."""
    parts = [HEAD.rstrip() + f"\n  {', '.join(f'`{one}`' for one in start.FIXED)}.\n"]
    usual: dict[str, Any] = {}
    for recipe in (*RECIPES, "criteria"):  # the last wins
        usual |= {name: cells for name, *cells in rows(configure.load([f"recipe={recipe}"]))}
    for group in dict.fromkeys(name.partition(".")[0] for name in usual):
        parts += [
            f"## {group}",
            "",
            "| setting | default | takes | recipes | what it is for |",
            "|---|---|---|---|---|",
        ]
        for name in (one for one in usual if one.partition(".")[0] == group):
            value, takes, about = usual[name]
            owners = [one for one in RECIPES if has(one, name)]
            recipes = "" if len(owners) == len(RECIPES) else ", ".join(owners)
            cells = (f"`{name}`", f"`{value}`", takes, recipes, about)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return re.sub(r"docs/((?:how-to|evidence)/[a-z-]+\.md)(#[a-z-]+)?", r"[\1](../\1\2)", "\n".join(parts))


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
    if GROUP in found["properties"] and ":" in settings.recipe.name:
        own = program.known(settings.recipe.name).json_schema()
        found.setdefault("$defs", {}).update(own.pop("$defs", {}))
        found["properties"][GROUP] = own
    return found
