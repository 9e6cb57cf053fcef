"""``hotloop export``: the weights of a run for other programs: safetensors, ``save_pretrained`` or ``torch.export``.

Weights alone need no model, so that safetensors run nothing of the run's program; the other formats make it again.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop import record
from hotloop.errors import ConfigError
from hotloop.train import checkpoint, configure
from hotloop.train.optional import require
from hotloop.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hotloop.step import Workload
    from hotloop.train.settings import Settings

FORMATS = ("safetensors", "pretrained", "torch-export")
CONFIG = "config.json"
OWN_CONFIG = "hotloop.json"
"""What `CONFIG` is called where ``save_pretrained`` writes one of that name."""


@dataclasses.dataclass(frozen=True)
class Made:
    """The models of a run, made again with a checkpoint's weights.

    Args:
        models: by name.
        example: returns positional and named arguments of a call of the model of a name; None where there are none.
        tokenizer: what ``save_pretrained`` writes beside a model.
    """

    models: Mapping[str, torch.nn.Module]
    example: Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
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

    The average of a program's model is an ``AveragedModel`` in its ``state``; one that no step has updated yet is none.
    Nothing says whose it is but the names of its weights. Of several models with the same names each has to have one,
    in their order; else they stay as trained.
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


def left_out(document: Mapping[str, Any], *, average: bool) -> list[str]:
    """Return the names of what a program's state holds tensors in, but for averages that are exported."""
    state = {name: one for name, one in document["others"].items() if name.startswith(checkpoint.STATE)}
    taken = {name for name, one in state.items() if average and isinstance(one, dict) and "n_averaged" in one}
    return [name for name, one in state.items() if name not in taken and _holds_tensors(one)]


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_holds_tensors, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor) and value.numel() > 1


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
        say: prints whether the weights are averages, and what is left out.

    Raises:
        ConfigError: a folder, a checkpoint or a model that cannot be used so.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists already: name another folder, or delete it")
    path, document = of_run(folder, wanted)
    settings = configure.from_dict(document["settings"])
    found, average = weights(document)
    left = left_out(document, average=average)
    for name in found:
        if not re.fullmatch(r"\w[\w.\[\]-]*", name):
            raise ConfigError(f"checkpoint {path} names a model {name[:80]!r}, which cannot be the name of a file")
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a command that was killed here
    try:
        part.mkdir(parents=True)
        if kind == "safetensors":
            _safetensors(found, part)
        else:
            made = make(settings, found)
            (_pretrained if kind == "pretrained" else _exported)(made, part)
        about = {
            "hotloop": __version__,
            "recipe": settings.recipe.name,
            "checkpoint": path.name,
            "step": document["position"].get("step"),
            "metrics": document["position"].get("best") or {},
            "average": average,
            "left_out": left,
            "format": kind,
            "models": list(found),
            "settings": document["settings"],
        }
        config = part / (OWN_CONFIG if (part / CONFIG).exists() else CONFIG)
        config.write_text(json.dumps(json.loads(record.to_json(about)), indent=2) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()
        part.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    what = "the average of the weights" if average else "the weights as trained"
    own = "an average is exported if it is torch's AveragedModel, which a step updates"
    say(f"Exported: {what}, of step {about['step']}" + (f"; not {', '.join(left)} of state=: {own}" if left else ""))
    return sorted(one for one in out.rglob("*") if one.is_file())


def _safetensors(found: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Write each model's weights by the names of its ``state_dict()``; tied weights are there under each name."""
    save = require("safetensors.torch", "hotloop export").save_file
    for name, held in found.items():
        if others := [key for key, value in held.items() if not isinstance(value, torch.Tensor)]:
            raise ConfigError(f"--format safetensors: {name} holds what is no tensor ({others[0]}): use torch-export")
        save({key: value.contiguous().clone() for key, value in held.items()}, folder / f"{name}.safetensors")


def _place(made: Made, folder: Path, name: str) -> Path:
    return folder if len(made.models) == 1 else folder / name


def _pretrained(made: Made, folder: Path) -> None:
    """Write each model by its own ``save_pretrained``, or by that of the model that it holds as ``net``."""
    for name, model in made.models.items():
        inner: Any = model if hasattr(model, "save_pretrained") else getattr(model, "net", None)
        if not hasattr(inner, "save_pretrained"):
            raise ConfigError(
                f"--format pretrained: {name} is a {type(model).__name__}, which has no save_pretrained(): expected a "
                "model of transformers, diffusers or peft. Use --format safetensors"
            )
        inner.save_pretrained(_place(made, folder, name))
    if made.tokenizer is not None:
        made.tokenizer.save_pretrained(folder)


def _exported(made: Made, folder: Path) -> None:
    """Write each model's program by ``torch.export``, of an example of its arguments.

    A size may vary where the model lets it.
    """
    if made.example is None:
        raise ConfigError("--format torch-export: this recipe calls its models by turns; use --format safetensors")
    for name, whole in made.models.items():
        args, kwargs = made.example(name)
        model = whole
        if any(one.kind is one.VAR_KEYWORD for one in inspect.signature(whole.forward).parameters.values()):
            model, args, kwargs = _Positional(whole, tuple(kwargs)), (*args, *kwargs.values()), {}
        arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        dynamic = {key: _sizes(one) for key, one in arguments.items()}
        try:
            program = torch.export.export(model.eval(), args, kwargs, dynamic_shapes=dynamic)
            torch.export.save(program, folder / f"{name}.pt2")
        except Exception as error:  # torch.export has many classes for code that it cannot take
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"--format torch-export: torch cannot export {name} ({type(error).__name__}: {reason}). Use --format "
                "safetensors, or change what it says in the model"
            ) from error


class _Positional(torch.nn.Module):
    """A model of inputs by name that takes them in their order: torch.export has no varying sizes in ``**inputs``."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the model."""
        return self.model(**dict(zip(self.names, inputs, strict=True)))


def _sizes(value: Any) -> Any:
    """Return which sizes of an argument may vary, as ``torch.export`` takes them: it finds out which do."""
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(range(value.ndim), torch.export.Dim.AUTO)
    if isinstance(value, Mapping):
        return {key: _sizes(one) for key, one in value.items()}
    return type(value)(map(_sizes, value)) if isinstance(value, list | tuple) else None


class _CalledError(Exception):
    """Ends a step at the first call of a model, whose arguments it has."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args_, self.kwargs = args, kwargs


def example_of(workload: Workload, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a program's step calls a model; the step ends there, and trains nothing.

    Raises:
        ConfigError: the step does not call it.
    """

    def called(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _CalledError(args, kwargs)

    model = workload.models()[name]
    handle = model.register_forward_pre_hook(called, with_kwargs=True)
    try:
        workload.run(next(workload.epoch()))
    except _CalledError as found:
        return found.args_, found.kwargs
    finally:
        handle.remove()
    raise ConfigError(f"--format torch-export: the step of the program does not call {name} as a module")
