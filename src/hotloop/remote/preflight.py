"""What a cluster is found to be before work begins: what fits, what has to be compiled, and what is in the way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.remote import environment
from hotloop.remote.client import python_here
from hotloop.remote.jobs import Sent
from hotloop.report import runs
from hotloop.report.text import count, seconds, size
from hotloop.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hotloop.remote.checking import Asked
    from hotloop.remote.jobs import Jobs

_SPARE_BYTES = 2**28
"""Of a disk: what a run needs beside its files, for records and small checkpoints."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What the job ``check`` found on the cluster.

    Args:
        facts: as `hotloop.remote.there.check` returns them.
        pip: what had to be installed for it; empty where the cluster has this hotloop.
    """

    facts: Mapping[str, Any]
    pip: Mapping[str, Any]

    @property
    def differences(self) -> list[str]:
        """The parts of the cache's key that are others there."""
        from hotloop.cache.keys import fits  # noqa: PLC0415 - loads torch

        there = self.facts["fits"]
        return [f"{name} {there.get(name)} (here {mine})" for name, mine in fits().items() if there.get(name) != mine]

    def lines(self, asked: Asked, sent: str) -> Iterator[str]:
        """Yield what a person should know before the run begins.

        Args:
            asked: the command.
            sent: what of the local cache travels, in words.
        """
        facts, fits = self.facts, self.facts["fits"]
        driver = f", driver {facts['driver']}" if facts.get("driver") else ""
        room = f"{size(facts['free_bytes'])} free" if "free_bytes" in facts else "no room"
        yield (
            f"Node {facts['node']}: torch {fits['torch']}, Triton {fits['triton']}, CUDA {fits['cuda']}{driver}, "
            f"GPU {fits['gpu']}, {room} in {facts['place']}"
        )
        yield "Environment: " + (
            "installed by pip there, as here" if self.pip else f"the cluster's, hotloop {__version__}, the same as here"
        )
        here, other = environment.versions(), facts["versions"]
        if differing := [
            f"{name} {other[name]} (here {here[name]})" for name in here if other.get(name, here[name]) != here[name]
        ]:
            yield f"Versions that differ there: {', '.join(differing)}"
        yield from (
            f"{one['level']}: {one['what']}; {one['remedy']}"
            for one in facts["findings"]
            if one["level"] in ("problem", "warning")
        )
        if not asked.compiles:
            yield "Compiled code: none is needed (training.optimization.use_torch_compile=false)"
            return
        if differs := self.differences:
            yield f"Compiled code: none of here fits there: {', '.join(differs)}"
        else:
            yield f"Compiled code: it fits there; {sent}"
        yield f"Compiled code that the cluster has and that fits: {count(len(facts['kept']), 'bundle')}"
        yield from _last_time(asked)

    def refuse(self, package_bytes: int) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: saying what is in the way, and what to do.
        """
        facts = self.facts
        where = f"node {facts['node']}"
        if ".".join(facts["python"].split(".")[:2]) != python_here():
            raise ConfigError(
                f"{where} has Python {facts['python']}, and this machine {python_here()}: checkpoints, compiled code "
                "and pinned packages are for one version; use the cluster's here, or a cluster with this one"
            )
        if "problem" in facts:
            raise ConfigError(
                f"{where} cannot keep the run in {facts['place']}: {facts['problem']}. Free the disk there, or set "
                "HOTLOOP_REMOTE_DIR to another folder before ray start"
            )
        needed = 2 * package_bytes + _SPARE_BYTES
        if facts["free_bytes"] < needed:
            raise ConfigError(
                f"{where} has {size(facts['free_bytes'])} free in {facts['place']}, and the run needs {size(needed)} "
                "at least: free the disk there, or set HOTLOOP_REMOTE_DIR to another folder before ray start"
            )
        dry = facts.get("dry_run")
        if dry and dry["code"]:
            raise ConfigError(f"the dry run on {where} ended with exit code {dry['code']}:\n{dry['said'].strip()}")


def look(jobs: Jobs, asked: Asked, archive: Path, say: Callable[[str], None]) -> Found:
    """Let the cluster look at itself and try the command, up to its first step.

    Where it has no hotloop, or another one, this one is installed for the job.

    Raises:
        ConfigError: the job cannot be started, or tells nothing.
    """
    pip: dict[str, Any] = {}
    for last in (False, True):
        answer = jobs.answer("check", "-", asked.command, Sent(archive, pip), say)
        if answer.document is not None and answer.document.get("digest") == environment.digest():
            return Found(answer.document, pip)
        if last or not answer.started:  # the cluster could not even begin
            break
        there = "another hotloop"
        if answer.document is None:  # the end of its log says why: often another python is first on PATH there
            said = answer.said.strip().rpartition("\n")[2][:300]
            there = f"no hotloop that answers{f' ({said})' if said else ''}"
        say(f"The cluster has {there}: hotloop {__version__} is installed there for this run, which may take minutes")
        pip = environment.pip(requirements=Path("requirements.txt").is_file())
    said = answer.said.strip()[-2000:] or "its hotloop is another one, although this one was installed"
    raise ConfigError(f"the cluster was to look at itself, and could not: {said}")


def _last_time(asked: Asked) -> Iterator[str]:
    """Say how long compiling took in the newest run of this program here."""
    for row in runs.find(Path("runs", asked.folder_name)):
        if spent := row.figures.get("compile_seconds"):
            yield f"Compiling took {seconds(spent)} in {row.folder}, on this machine"
            return
