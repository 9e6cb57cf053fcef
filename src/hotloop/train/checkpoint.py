"""Checkpoints: everything a run needs to go on to the same result, written atomically, read with ``weights_only``."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random
import re
import zipfile
from types import NoneType
from typing import TYPE_CHECKING, Any, BinaryIO

from hotloop.errors import ConfigError, TrainingFailedError, describe
from hotloop.files import open_regular, whole
from hotloop.report import runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

SCHEMA_VERSION = 1
FOLDER, BEST, LAST = "checkpoints", "best.pt", "last.pt"
_OTHER = "Use another checkpoint of its folder (best.pt, last.pt), or start anew"
STATE = "state["
"""The names of a program's state in a checkpoint begin so: ``state[0]``, ``state[1]``."""


@dataclasses.dataclass
class Position:
    """Where a run is. ``step`` counts optimizer steps; ``stale`` counts validations since the best one."""

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    best_step: int = 0
    stale: int = 0
    best: dict[str, float] = dataclasses.field(default_factory=dict)
    validated_step: int = -1


def save(path: Path, document: Mapping[str, Any]) -> None:
    """Write a checkpoint so that the file at ``path`` is always a whole one, the former or the new.

    Raises:
        OSError: it cannot be written; the former stays. Its ``errno`` is the disk's.
        TrainingFailedError: something in it cannot be written, which trying again would not change; the same.
    """
    import torch  # noqa: PLC0415 - a search deletes checkpoints, and starts in a third of the time without torch

    try:
        with whole(path) as file, _with_sums():
            torch.save({"schema": SCHEMA_VERSION, **document}, file)
    except (OSError, RuntimeError) as error:
        disk: BaseException | None = error
        while disk is not None and not isinstance(disk, OSError):  # torch's writer raises a RuntimeError behind it
            disk = disk.__context__
        failed = OSError(f"checkpoint {path} cannot be written: {disk or error}")
        failed.errno = disk.errno if disk else None
        raise failed from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle refuses has no class of its own
        raise TrainingFailedError(
            f"checkpoint {path} cannot be written ({error}): it holds tensors and plain values alone. Leave all else "
            "out of what state_dict() returns"
        ) from error


@contextlib.contextmanager
def _with_sums() -> Iterator[None]:
    """Let torch write a checksum beside each part, also where the program has switched that off."""
    from torch import serialization  # noqa: PLC0415 - as in save

    before = serialization.get_crc32_options()
    serialization.set_crc32_options(compute_crc32=True)
    try:
        yield
    finally:
        serialization.set_crc32_options(before)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Nothing in it is executed: only tensors and plain values are accepted.

    Raises:
        ConfigError: it is missing, no checkpoint, or of a newer schema; or it has changed since it was written.
    """
    import torch  # noqa: PLC0415 - as in save

    if not path.is_file():
        raise ConfigError(f"checkpoint {path}: no such file")
    try:
        with open_regular(path, links=True) as file:
            _check_sums(file)
            document = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {error}. {_OTHER}") from error
    except Exception as error:  # a torn or foreign file raises anything from EOFError to UnpicklingError
        if isinstance(error, pickle.UnpicklingError) and (named := _objects_in(error)):
            raise ConfigError(
                f"checkpoint {path} holds objects that hotloop does not load ({named}): hotloop train did not write "
                f"it. {_OTHER}"
            ) from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"checkpoint {path} cannot be read ({reason}): it is torn, has changed since it was written, or is no "
            f"checkpoint of hotloop. {_OTHER}"
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
        raise ConfigError(f"{path} is no checkpoint of hotloop: expected one that hotloop train wrote")
    if document["schema"] > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema {document['schema']}; this version of hotloop reads up to {SCHEMA_VERSION}"
        )
    _check_parts(path, document, ("model", "settings", "position", "others"))
    models, averages = document["model"], [one for name, one in document["others"].items() if name.endswith(".average")]
    bad = {"model": not all(isinstance(one, dict) for one in (*models.values(), *averages))}
    bad["position"] = not _is_position(document["position"])
    recipe = document["settings"].get("recipe")
    bad["settings"] = not (isinstance(recipe, dict) and isinstance(recipe.get("name"), str))
    if any(bad.values()):
        raise _cannot_be_used(path, [name for name, is_bad in bad.items() if is_bad])
    return document


def check_resumable(path: Path, document: Mapping[str, Any]) -> None:
    """Check that a checkpoint has all that a run goes on from.

    Raises:
        ConfigError: a part is missing, or of another type.
    """
    processes = document.get("of_ranks")
    if not isinstance(processes, list) or not all(isinstance(one, dict) for one in processes):
        raise _cannot_be_used(path, ["of_ranks"])
    kinds: dict[str, tuple[type, ...]] = {"data": (str,), "record": (dict,), "loop": (dict, NoneType)}
    each: dict[str, tuple[type, ...]] = {"random": (dict,), "epoch_began": (dict, NoneType), "generators": (list,)}
    each["loader"] = (object,)  # a program's own loader may keep anything
    for one, wanted in ((document, kinds), *((one, each) for one in (document, *processes))):
        if wrong := [name for name, kind in wanted.items() if name not in one or not isinstance(one[name], kind)]:
            raise _cannot_be_used(path, wrong)


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Say which part of a checkpoint cannot be used; nothing but ours runs in the block.

    Raises:
        ConfigError: the block failed.
    """
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"the checkpoint's {name} cannot be restored: {describe(error)}. {_OTHER}") from error


def of_rank(document: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Return what a checkpoint has of one of the processes that trained together.

    Raises:
        ConfigError: it was written by fewer.
    """
    own: list[Mapping[str, Any]] = [document, *document.get("of_ranks", ())]
    if rank >= len(own):
        raise ConfigError(f"the checkpoint is of run.devices={len(own)}: it has nothing of process {rank}")
    return own[rank]


def _check_sums(file: BinaryIO) -> None:
    """Check each part of a checkpoint by the checksum that torch writes beside it, and does not look at itself.

    Raises:
        ValueError: a part has changed since it was written, or is packed, which torch's are not.
        zipfile.BadZipFile: the file is not whole.
    """
    with zipfile.ZipFile(file) as parts:
        if any(one.compress_type != zipfile.ZIP_STORED for one in parts.infolist()):  # could fill the memory
            raise ValueError("a part of it is packed")
        try:
            changed = parts.testzip()
        except OSError as error:  # a part is said to lie before the file's begin
            raise ValueError("its table of parts is wrong") from error
        if changed:
            raise ValueError(f"{changed} has another checksum than it was written with")
    file.seek(0)


def _objects_in(error: pickle.UnpicklingError) -> str:
    """Name the class or function that torch has refused to load; empty where it refused something else."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return found[1] if found else ""


def _check_parts(path: Path, document: Mapping[str, Any], names: Sequence[str]) -> None:
    if wrong := [name for name in names if not isinstance(document.get(name), dict)]:
        raise _cannot_be_used(path, wrong)


def _cannot_be_used(path: Path, parts: Sequence[str]) -> ConfigError:
    return ConfigError(f"checkpoint {path} has no part named {', '.join(parts)}, or a damaged one. {_OTHER}")


def _is_position(given: Mapping[str, Any]) -> bool:
    usual = dataclasses.asdict(Position())
    return all(name in usual and type(value) is type(usual[name]) for name, value in given.items())


def weights(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the weights, by model, that a checkpoint's validation judged: the averages, where a recipe kept some."""
    others = document["others"]
    return {name: {**held, **others.get(f"{name}.average", {})} for name, held in document["model"].items()}


def judged(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a checkpoint's validation judged: the weights by model and, beside them, the state of a program.

    A program's metrics may be those of an average of the weights, which is in its state.
    """
    return weights(document) | {name: held for name, held in document["others"].items() if name.startswith(STATE)}


def find(folder: Path, *names: str) -> Path:
    """Return the first of a run's checkpoints that is there.

    Raises:
        ConfigError: the run has none of them, or it is no run.
    """
    for name in names:
        if (path := folder / FOLDER / name).is_file():
            return path
    if folder.is_file():
        raise ConfigError(f"run {folder} is a file: expected the folder of the run, with {FOLDER}/ in it")
    if not folder.is_dir():
        raise ConfigError(f"run {folder}: no such folder; `hotloop runs list` names those below runs/")
    if inside := [one for one in runs.member_folders(folder) if any((one / FOLDER / name).is_file() for name in names)]:
        raise ConfigError(
            f"run {folder} is a {runs.kind_of(folder)}: name one of its runs, {' or '.join(map(str, inside[:3]))}"
        )
    raise ConfigError(
        f"run {folder} has no checkpoint: expected {FOLDER}/{' or '.join(names)} in it. If it was stopped before its "
        "first one, there is nothing to go on with: start again in another run.folder "
        "(training.checkpoint_every_steps says how often one is written)"
    )


def random_state() -> dict[str, Any]:
    """Return the state of every generator that a step may draw from, as tensors and plain values."""
    import numpy as np  # noqa: PLC0415 - comes with the optional packages
    import torch  # noqa: PLC0415 - as in save

    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    name, key, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one is meant
    state["numpy"] = (name, torch.from_numpy(np.asarray(key, dtype="int64")), *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set every generator as it was; those of a device that is not here stay as they are.

    Raises:
        ConfigError: it is the state of no generator.
    """
    import numpy as np  # noqa: PLC0415 - comes with the optional packages
    import torch  # noqa: PLC0415 - as in save

    with part("random numbers"):
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        name, key, *rest = state["numpy"]
        np.random.set_state((name, key.numpy().astype("uint32"), *rest))  # noqa: NPY002
        if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all(state["cuda"])
        if "mps" in state and torch.backends.mps.is_available():
            torch.mps.set_rng_state(state["mps"])


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Put every generator back, at the end of the block, to where it is at its start."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def fit_weights(model: torch.nn.Module, weights: Mapping[str, Any], name: str, setting: str = "model.name") -> None:
    """Load a checkpoint's weights into a model, all of them; ``setting`` is what names the model.

    Raises:
        ConfigError: they are of another model.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"the checkpoint's weights do not fit {setting}={name}: {reason}") from error
