"""Inductor's options as the installed torch defines them, read from its source: torch is not imported here."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Option:
    """An option like ``triton.cudagraphs``, with its type and default as written in the source."""

    name: str
    type: str
    default: str


@functools.cache
def list_options() -> tuple[Option, ...]:
    """Return every option of torch._inductor.config, sorted by name; empty where torch has no Inductor."""
    config = "torch._inductor.config"
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ()
    _, *inside = config.split(".")
    source = Path(spec.submodule_search_locations[0], *inside).with_suffix(".py")
    if not source.is_file():
        return ()
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return tuple(sorted(_options(tree.body, ""), key=lambda option: option.name))


def _options(body: list[ast.stmt], prefix: str) -> list[Option]:
    found: dict[str, Option] = {}
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            for option in _options(statement.body, f"{prefix}{statement.name}."):
                found[option.name] = option
            continue
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            name, kind, value = statement.target.id, ast.unparse(statement.annotation), statement.value
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, kind, value = statement.targets[0].id, "", statement.value
        else:
            continue
        if not name.startswith("_"):
            default = " ".join(ast.unparse(value).split())
            found[prefix + name] = Option(prefix + name, kind, default)
    return list(found.values())
