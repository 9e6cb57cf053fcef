"""Checkpoints: everything a run needs to go on to the same result, written atomically, read with ``weights_only``."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random
import zipfile
from typing import TYPE_CHECKING, Any, BinaryIO

from hotloop.errors import ConfigError, TrainingFailedError, describe
from hotloop.files import open_regular, whole
from hotloop.report import runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

SCHEMA_VERSION = 1
FOLDER, BEST, LAST = "checkpoints", "best.pt", "last.pt"
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
        OSError: it cannot be written; the former stays.
        TrainingFailedError: something in it cannot be written, which trying again would not change; the same.
    """
    import torch  # noqa: PLC0415 - a search deletes checkpoints, and starts in a third of the time without torch

    try:
        with whole(path) as file, _with_sums():
            torch.save({"schema": SCHEMA_VERSION, **document}, file)
    except (OSError, RuntimeError) as error:
        raise OSError(f"checkpoint {path} cannot be written: {describe(error)}") from error
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
        ConfigError: it is missing, no checkpoint, of another schema, or has changed since it was written.
    """
    import torch  # noqa: PLC0415 - as in save

    if not path.is_file():
        raise ConfigError(f"checkpoint {path}: no such file")
    try:
        with open_regular(path, links=True) as file:
            _check_sums(file)
            document: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn or foreign file raises anything from EOFError to UnpicklingError
        raise ConfigError(
            f"checkpoint {path} cannot be read ({describe(error)}): it is torn, has changed since it was written, or "
            "hotloop train did not write it. Use another checkpoint of its folder (best.pt, last.pt), or start anew"
        ) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA_VERSION:
        raise ConfigError(f"{path} is no checkpoint of this version of hotloop")
    return document


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
    """Set every generator as it was; those of a device that is not here stay as they are."""
    import numpy as np  # noqa: PLC0415 - comes with the optional packages
    import torch  # noqa: PLC0415 - as in save

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
