"""``hotloop export``: the weights of a run for other programs, as safetensors or by ``save_pretrained``.

Weights alone need no model, so that safetensors run nothing of the run's program; ``pretrained`` makes it again.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import torch

from hotloop import record
from hotloop.errors import ConfigError
from hotloop.train import checkpoint, configure
from hotloop.train.optional import require
from hotloop.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hotloop.train.settings import Settings

FORMATS = ("safetensors", "pretrained")
CONFIG = "config.json"
OWN_CONFIG = "hotloop.json"
"""What `CONFIG` is called where ``save_pretrained`` writes one of that name."""


@dataclasses.dataclass(frozen=True)
class Made:
    """The models of a run, made again with a checkpoint's weights.

    Args:
        models: by name.
        tokenizer: what ``save_pretrained`` writes beside a model.
    """

    models: Mapping[str, torch.nn.Module]
    tokenizer: Any = None


def of_run(folder: Path, wanted: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the path and the document of a run's checkpoint: the ``best`` one, else the ``last``, or as wanted.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    names = {None: (checkpoint.BEST, checkpoint.LAST), "best": (checkpoint.BEST,), "last": (checkpoint.LAST,)}
    path = checkpoint.find(folder, *names[wanted])
    return path, checkpoint.load(path)


def weights(document: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], bool]:
    """Return the weights of a checkpoint by the model's name, and whether they are averages (EMA).

    The average of a program's model is an ``AveragedModel`` in its ``state``, known by the names of its weights. Of
    several models with the same names each has to have one, in their order; else they stay as trained.
    """
    others, found = document["others"], checkpoint.weights(document)
    averages = [one for one in others.values() if isinstance(one, dict) and one.get("n_averaged", 0) > 0]
    averaged = any(f"{name}.average" in others for name in found)
    for keys in {frozenset(held) for held in found.values()}:
        names = [name for name, held in found.items() if set(held) == keys]
        own = [one for one in averages if one.keys() - {"n_averaged"} == {f"module.{key}" for key in keys}]
        if len(own) == len(names):
            averaged = True
            for name, one in zip(names, own, strict=True):
                found[name] = {key: one[f"module.{key}"] for key in found[name]}
    return found, averaged


def export(  # noqa: PLR0913, PLR0917 - arguments and options of the command
    folder: Path,
    out: Path,
    kind: str,
    wanted: str | None,
    make: Callable[[Settings, dict[str, Any]], Made],
    say: Callable[[str], None],
) -> list[Path]:
    """Write a run's weights into a new folder, whole or not at all, and return its files.

    Args:
        folder: the run's.
        out: the folder to make.
        kind: one of `FORMATS`.
        wanted: ``best`` or ``last``; None takes the best one where there is one.
        make: makes the run's models again, of its settings and weights.
        say: prints whether the weights are averages.

    Raises:
        ConfigError: a folder, a checkpoint or a model that cannot be used so.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists already: name another folder, or delete it")
    path, document = of_run(folder, wanted)
    settings, (found, average) = configure.from_dict(document["settings"]), weights(document)
    for name in found:
        if not re.fullmatch(r"\w[\w.\[\]-]*", name):
            raise ConfigError(f"checkpoint {path} names a model {name[:80]!r}, which cannot be the name of a file")
    about = {
        "hotloop": __version__,
        "recipe": settings.recipe.name,
        "checkpoint": path.name,
        "step": document["position"].get("step"),
        "metrics": document["position"].get("best") or {},
        "average": average,
        "format": kind,
        "models": list(found),
        "settings": document["settings"],
    }
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a command that was killed here
    try:
        part.mkdir(parents=True)
        if kind == "safetensors":
            _safetensors(found, part)
        else:
            _pretrained(make(settings, found), part)
        config = part / (OWN_CONFIG if (part / CONFIG).exists() else CONFIG)
        config.write_text(json.dumps(json.loads(record.to_json(about)), indent=2) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()
        part.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    say(f"Exported: the {'average of the weights' if average else 'weights as trained'}, of step {about['step']}")
    return sorted(one for one in out.rglob("*") if one.is_file())


def _safetensors(found: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Write each model's weights by the names of its ``state_dict()``; tied weights are there under each name."""
    save = require("safetensors.torch", "hotloop export").save_file
    for name, held in found.items():
        if others := [key for key, value in held.items() if not isinstance(value, torch.Tensor)]:
            raise ConfigError(f"--format safetensors: {name} holds an object that is no tensor ({others[0]})")
        save({key: value.contiguous().clone() for key, value in held.items()}, folder / f"{name}.safetensors")


def _pretrained(made: Made, folder: Path) -> None:
    """Write each model by its own ``save_pretrained``, or by that of the model that it holds as ``net``."""
    for name, model in made.models.items():
        inner: Any = model if hasattr(model, "save_pretrained") else getattr(model, "net", None)
        if not hasattr(inner, "save_pretrained"):
            raise ConfigError(
                f"--format pretrained: {name} is a {type(model).__name__}, which has no save_pretrained(): expected a "
                "model of transformers, diffusers or peft. Use --format safetensors"
            )
        inner.save_pretrained(folder if len(made.models) == 1 else folder / name)
    if made.tokenizer is not None:
        made.tokenizer.save_pretrained(folder)
