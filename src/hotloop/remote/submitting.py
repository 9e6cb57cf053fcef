"""Sends a run to a cluster: checks here, looks there, and hands it over."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, DataError
from hotloop.remote import checking, clusters, environment, fetch, locating, package, preflight, runs, there
from hotloop.remote.client import OVER, WORDS, Client, RefusedError, UnknownJobError
from hotloop.remote.jobs import Jobs, Sent
from hotloop.report.runs import FETCHED
from hotloop.report.text import count, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hotloop.remote.checking import Asked
    from hotloop.remote.package import Package

MOST_COMPILED_BYTES = 2**28
"""Of compiled code that travels, the newest; Ray keeps what travels in its memory."""
MOST_PART_BYTES = 80 * 2**20
_MOST_REQUEST = 100 * 2**20 - 2**16
"""Ray's dashboard takes no larger request (``DASHBOARD_CLIENT_MAX_SIZE``)."""


class AnswerLostError(DataError):
    """The answer to the start of a job was lost: it may have begun."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What ``hotloop submit`` was asked for.

    Args:
        address: of the cluster; None takes the only one that is known.
        command: behind ``--``.
        include: paths that travel although git does not track them.
        retries: how often the run is resumed after it died.
        limit_mb: most megabytes that travel.
        dry: stop before the run.
        folder: here, into which results are fetched; None chooses one in ``runs``.
    """

    address: str | None
    command: Sequence[str]
    include: Sequence[str] = ()
    retries: int = 0
    limit_mb: int = package.LIMIT_MB
    dry: bool = False
    folder: Path | None = None


def submit(
    request: Request, say: Callable[[str], None], tell: Callable[[Mapping[str, Any]], None] = lambda _: None
) -> runs.RemoteRun | None:
    """Submit a run; None after a dry run.

    Args:
        request: what is asked for.
        say: called with what a person should know, a line at a time.
        tell: called with what the cluster was found to be, as `hotloop.remote.there.check` returns it.

    Raises:
        ConfigError: anything is in the way. Nothing trains then.
    """
    asked = checking.check(request.command)
    packed = package.collect(Path.cwd(), request.include, request.limit_mb)
    _check_sources(asked, packed)
    address = clusters.chosen(request.address)
    client = Client(address)
    gpus = asked.gpus([one.resources for one in client.nodes()])
    clusters.add(address)
    for line in packed.lines():
        say(line)
    with tempfile.TemporaryDirectory(prefix="hotloop-submit-") as made:
        archive, key, name = Path(made, "tree.zip"), secrets.token_hex(32), runs.new_name()
        package.write(packed, archive, environment.files(), _MOST_REQUEST)
        jobs = Jobs(client, key, gpus)
        found = preflight.look(jobs, asked, archive, say)
        modules, sent = _compiled(asked, found, Path(made))
        for line in found.lines(asked, sent):
            say(line)
        tell(found.facts)
        found.refuse(packed.size)
        if request.dry:
            say("Dry run: settings, data and one batch were checked there, and nothing was trained")
            return None
        folder = str(request.folder or Path("runs", asked.folder_name, name).absolute())
        run = runs.RemoteRun(
            name, address, f"hotloop-{name}", key, asked.command, folder, time.time(), gpus, found.pip,
            storage=asked.storage, root=str(packed.root), include=tuple(request.include),
        )  # fmt: skip
        return _start(jobs, run, None, Sent(archive, found.pip, modules), retries=request.retries)


def resume(
    run: runs.RemoteRun, retries: int, say: Callable[[str], None] = lambda _: None, *, from_storage: bool = True
) -> runs.RemoteRun:
    """Start a run's job anew on the node that has it; a run that is on none goes on from its ``run.storage``.

    Args:
        run: the run.
        retries: how often its job starts it again after it died.
        say: called with what a person should know.
        from_storage: whether the storage is taken where no node has the run.

    Raises:
        ConfigError: the cluster does not answer, the run goes on or is finished, or no node has it.
        AnswerLostError: the cluster's answer was lost.
        DataError: the cluster does not answer, and nothing was started.
    """
    with runs.held(run.name):
        run = runs.find(run.name)  # another process may have resumed it meanwhile
        client = Client(run.address)
        with contextlib.suppress(UnknownJobError):
            status = str(client.job(run.submission).status)
            if status == "SUCCEEDED" and run.command[0] != "hpo":  # a search may have ended with trials left
                raise ConfigError(
                    f"{run.name} is finished, and nothing is left to train: hotloop submit fetch {run.name}"
                )
            if status not in OVER:
                raise ConfigError(f"{run.name} is not over: follow it by `hotloop submit logs -f`, or stop it first")
        number = run.number + 1
        again = dataclasses.replace(run, submission=f"hotloop-{run.name}-{number}", number=number)
        try:
            node = locating.node_of(client, run)
        except locating.NowhereError:
            if not run.storage or not run.sent or not from_storage:
                raise
            return _from_storage(Jobs(client, run.key, run.gpus), run, again, retries, say)
        with locating.environment_of(run) as sent:
            return _start(Jobs(client, run.key, run.gpus, node), again, run, sent, retries=retries, again=True)


def _from_storage(
    jobs: Jobs, run: runs.RemoteRun, again: runs.RemoteRun, retries: int, say: Callable[[str], None]
) -> runs.RemoteRun:
    """Start a run on any node, from the copy at its storage and the files of the folder that travelled at first."""
    where = f"{run.storage.rstrip('/')}/{run.name}"
    say(f"No node has {run.name} now: it goes on from {where}, with the files that {run.root} has now")
    packed = package.collect(Path(run.root), run.include, 10**6)  # the zip file has a limit
    with tempfile.TemporaryDirectory(prefix="hotloop-submit-") as made:
        archive = Path(made, "tree.zip")
        package.write(packed, archive, environment.files(), _MOST_REQUEST)
        return _start(jobs, again, run, Sent(archive, run.pip), retries=retries, storage=where)


def _start(
    jobs: Jobs, run: runs.RemoteRun, former: runs.RemoteRun | None, sent: Sent, **options: Any
) -> runs.RemoteRun:
    """Start a job; what is lost between the cluster's answer and this machine is known here all the same."""
    runs.keep(run)
    try:
        jobs.run(run.submission, run.name, run.command, sent, **options)
    except RefusedError:
        if former:
            runs.keep(former)
        else:
            runs.forget(run.name)
        raise
    except DataError as error:
        raise AnswerLostError(
            f"{error}. The run may have begun all the same: see hotloop submit status {run.name}"
        ) from error
    run = dataclasses.replace(run, sent=True)
    runs.keep(run)
    if former and Path(run.folder, FETCHED).is_file():  # lists would go on to say how the former job ended
        fetch.note(run, WORDS["PENDING"], lambda _: None)
    return run


def _check_sources(asked: Asked, packed: Package) -> None:
    """Refuse a program that would not be there."""
    for one in asked.sources:
        if one not in packed.files:
            raise ConfigError(f"{one} does not travel, since git does not track it: git add {one}, or --include {one}")


def _compiled(asked: Asked, found: preflight.Found, made: Path) -> tuple[tuple[Path, ...], str]:
    """Return the folders of compiled code that travel, where any fits, and what they are in words.

    Each is a request of its own, and Ray takes no larger one than it says.
    """
    from hotloop.cache.compiled import compiled_store  # noqa: PLC0415 - loads torch
    from hotloop.cache.share import Share  # noqa: PLC0415

    store = compiled_store()
    if store is None or not asked.compiles or found.differences:
        return (), "nothing is kept here"
    parts, left = parted([(one.name, one.size) for one in store.entries() if one.name not in found.facts["kept"]])
    names, folders, bundles, total = {one.name for one in store.entries()}, [], 0, 0
    for number, part in enumerate(parts):
        folder = made / str(number) / there.SENT
        moved = Share(str(folder)).push(store, but=names - part)
        if moved.bundles:
            folders.append(folder)
        bundles, total = bundles + moved.bundles, total + moved.size
    stays = f"; {count(left, 'bundle')} more would be too much" if left else ""
    if not bundles:
        return (), f"nothing is kept here that the cluster has not{stays}"
    return tuple(folders), f"{count(bundles, 'bundle')}, {size(total)}, travel{stays}"


def parted(sizes: Sequence[tuple[str, int]]) -> tuple[list[set[str]], int]:
    """Return which bundles travel together, of the first ones that there is room for, and how many stay here."""
    parts: list[set[str]] = []
    room, total, left = 0, 0, 0
    for name, length in sizes:
        if length > MOST_PART_BYTES or total + length > MOST_COMPILED_BYTES:
            left += 1
            continue
        if not parts or length > room:
            parts.append(set())
            room = MOST_PART_BYTES
        parts[-1].add(name)
        room, total = room - length, total + length
    return parts, left
