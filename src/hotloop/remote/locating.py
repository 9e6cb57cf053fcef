"""Finds the node that has a run: the one of its job; after a loss, whichever of the cluster has its folder."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError, DataError
from hotloop.remote import environment, package
from hotloop.remote.jobs import Jobs, Sent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.remote.client import Client
    from hotloop.remote.runs import RemoteRun

_ANSWER_SECONDS, _INSTALL_SECONDS = 120.0, 1800.0


class NowhereError(ConfigError):
    """No node of the cluster has the run."""


class SilentError(ConfigError):
    """No node is known to have the run, and one did not answer."""


def node_of(client: Client, run: RemoteRun) -> str:
    """Return the node that has a run's folder. The run's own key is shown to none that has not.

    Raises:
        NowhereError: no node has it.
        SilentError: no node is known to have it, and one did not answer.
    """
    silent, nodes = [], client.nodes()
    with environment_of(run) as sent:
        for node in nodes:
            jobs = Jobs(client, secrets.token_hex(32), node=node.name, seconds=_seconds(run))
            try:
                found = jobs.answer("find", run.name, sent=sent)
            except DataError as error:
                silent.append(str(error))
                continue
            if found.document is None:
                silent.append(found.said)
            elif found.document.get("there"):
                return node.name
    if silent:
        raise SilentError(
            f"{run.name}: of the nodes of {run.address}, some could not be asked for it, and the others do not have "
            f"it: {silent[0].strip()[-1000:]}"
        )
    raise NowhereError(
        f"no node of {run.address} has run {run.name}, of {len(nodes)} that were asked: it never began there, the "
        "node that has it is not part of the cluster now, or its disk is gone. Start Ray on that node again, or "
        "submit the run anew"
    )


def shown(client: Client, run: RemoteRun, node: str) -> None:
    """Let a node show the folder of a run whose job was killed, or went with the head.

    Raises:
        ConfigError: it cannot.
    """
    with environment_of(run) as sent:
        jobs = Jobs(client, run.key, node=node, seconds=_seconds(run))
        answer = jobs.answer("link", run.name, sent=sent)
    if answer.document is None or "problem" in answer.document:
        raise ConfigError(
            f"{run.address} could not show {run.name}: {(answer.document or {}).get('problem', answer.said)}"
        )


@contextlib.contextmanager
def environment_of(run: RemoteRun) -> Iterator[Sent]:
    """Return what a job needs that finds its files on the node: the environment of the run, where it had its own."""
    if not run.pip:
        yield Sent()
        return
    with tempfile.TemporaryDirectory(prefix="hotloop-submit-") as made:
        archive = Path(made, "environment.zip")
        package.write(package.Package(Path(made), {}), archive, environment.files())
        yield Sent(archive, run.pip)


def _seconds(run: RemoteRun) -> float:
    return _INSTALL_SECONDS if run.pip else _ANSWER_SECONDS
