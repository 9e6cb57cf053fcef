"""What is asked of a cluster, checked here first: by the code that ``hotloop train --dry-run`` begins with."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError
from hotloop.train import conf_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hotloop.train.settings import Settings

VERBS = ("train", "hpo", "kfold")
_CHOSEN = ("run.folder", "run.resume", "hpo.folder")
"""Settings that a remote run is given by hotloop itself."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A command that a cluster can be asked to run.

    Args:
        command: the verb and its arguments, as they were typed.
        settings: that it has.
        sources: the files that it names, below the working folder.
    """

    command: tuple[str, ...]
    settings: Settings
    sources: tuple[str, ...]

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled."""
        return self.settings.training.optimization.use_torch_compile is not False

    @property
    def storage(self) -> str:
        """The place that a run's folder is copied to, as a URL that any node reads; empty without one."""
        found = self.settings.run.storage
        if not found or self.command[0] == "hpo":
            return ""
        return found if "://" in found else f"file://{found}" if Path(found).is_absolute() else ""

    @property
    def folder_name(self) -> str:
        """The name of the folder, below ``runs``, of runs of this program or recipe."""
        return conf_files.folder_name(self.settings.recipe.name)

    def gpus(self, nodes: Iterable[Mapping[str, float]]) -> float:
        """Return how many GPUs the job takes of a node.

        Raises:
            ConfigError: no node has as many.
        """
        from hotloop.train.cluster import Cluster  # noqa: PLC0415

        if "ray" in (self.settings.hpo.engine, self.settings.kfold.engine):
            return 0  # its trials or folds take them
        there = tuple(nodes)
        wanted = Cluster(None, self.settings, there).needs["num_gpus"]
        most = max((one.get("GPU", 0) for one in there), default=0)
        if self.settings.run.device.startswith("cuda:"):
            raise ConfigError(
                f"run.device={self.settings.run.device}: the cluster chooses the GPU; set run.device=cuda, or leave "
                "it out"
            )
        if wanted > most:
            raise ConfigError(
                f"run.devices={self.settings.run.devices}: the run needs {wanted:g} GPUs of one node, and the most "
                f"that a node of the cluster has is {most:g}: set fewer run.devices, name the CPU (run.accelerator=cpu "
                "or run.device=cpu, whichever the recipe has), or name another cluster by --address"
            )
        return wanted


def check(command: Sequence[str]) -> Asked:
    """Check a command, and compose its settings.

    Raises:
        ConfigError: it is none of ``train``, ``hpo`` and ``kfold``, or a setting cannot be used.
    """
    verb = command[0] if command else ""
    if verb not in VERBS:
        raise ConfigError(
            f"{f'-- {shlex.join(command)}' if command else 'nothing stands behind --'}: expected train, hpo or kfold "
            "with its settings, such as "
            "hotloop submit --address http://HEAD:8265 -- train recipe=digits"
        )
    config, overrides = _read(command[1:])
    for one in overrides:
        if (name := one.partition("=")[0].lstrip("+")) in _CHOSEN:
            raise ConfigError(
                f"{one}: hotloop submit chooses the folder there, and fetches it into runs/; leave {name} out"
            )
    if config and config.is_absolute():
        raise ConfigError(f"--config {config}: expected a path below this folder, which the cluster has as well")
    settings = _settings(verb, overrides, config)
    name = settings.recipe.name
    files = [Path(name.rpartition(":")[0])] if ".py:" in name else []
    return Asked(tuple(command), settings, (*map(_below, files), *([str(config)] if config else [])))


def _settings(verb: str, overrides: list[str], config: Path | None) -> Settings:
    from hotloop.train import configure, kfold, start  # noqa: PLC0415 - loads torch and the optional packages

    if verb == "hpo":
        from hotloop.train.search.preparing import prepared  # noqa: PLC0415

        return prepared(configure.load_search(overrides, config))
    study = kfold.prepare(kfold.with_splits(overrides, config) if verb == "kfold" else overrides, config)
    return study.settings if study else start.prepare(overrides, config).settings


def _read(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Separate the file of settings from the settings."""
    config, overrides, rest = None, [], list(arguments)
    while rest:
        one = rest.pop(0)
        name, equals, value = one.partition("=")
        if name == "--config":
            config = Path(value if equals else rest.pop(0) if rest else "")
        elif one.startswith("-"):
            raise ConfigError(
                f"{one} behind --: expected settings and --config PATH alone; options of hotloop submit, such as "
                "--dry-run, stand before --"
            )
        else:
            overrides.append(one)
    return config, overrides


def _below(path: Path) -> str:
    """Return a program's file as a path below the working folder, where the cluster has it."""
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError as error:
        raise ConfigError(
            f"{path} is not below {Path.cwd()}, the folder that travels: start hotloop submit above it"
        ) from error
