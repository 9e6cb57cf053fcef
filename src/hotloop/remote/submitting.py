"""Sends a run to a cluster: checks its settings here, and hands it over with the files of this folder."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.record import SUBMITTED
from hotloop.remote import runs
from hotloop.remote.client import WORDS, Client, UnknownJobError
from hotloop.remote.runs import RemoteRun
from hotloop.train import conf_files, configure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotloop.train.settings import Settings

VERBS = ("train", "hpo", "kfold")
_CHOSEN = ("run.folder", "run.resume", "hpo.folder")
"""Settings that a remote run is given by hotloop itself."""
STOP_SECONDS = 60
"""Which a run that is stopped has to save a checkpoint before Ray kills it."""
LEFT_OUT = (
    ".git", "__pycache__", ".venv", "/runs", ".env", ".env.*", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks",
    "*.kdbx", "*.keytab", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".npmrc", ".pypirc",
    ".pgpass", ".my.cnf", ".htpasswd", ".git-credentials", ".boto", ".s3cfg", ".vault-token", "credentials*",
    "secret*.json", "secret*.toml", "secret*.y*ml", "*secret.json", "service-account*.json", "service_account*.json",
    "kaggle.json", "auth_token", ".ssh", ".aws", ".azure", ".docker", ".gcloud", ".gnupg", ".huggingface", ".kaggle",
    ".kube", ".oci", ".secrets", "secrets",
)  # fmt: skip
"""What stays here, in the words of ``.gitignore``: results, environments, and what looks like a secret."""


def submit(
    command: Sequence[str], address: str | None, retries: int = 0, pip: str = "", *, dry: bool = False
) -> RemoteRun:
    """Submit a run, and remember it; a dry run is not remembered.

    Args:
        command: the verb and its arguments.
        address: of the cluster; None takes that of the newest run.
        retries: how often the run is resumed after it died.
        pip: a file of requirements that Ray installs for it; empty without one.
        dry: only check there.

    Raises:
        ConfigError: a setting cannot be used, or the cluster cannot be.
        DataError: the cluster refused the job, or its answer was lost.
    """
    settings = check(command)
    client = Client(runs.address(address))
    name = runs.new_name()
    folder = Path("runs", conf_files.folder_name(settings.recipe.name), name).absolute()
    storage = str(getattr(settings.run, "storage", "") or "") if command[0] != "hpo" else ""
    run = RemoteRun(
        name, client.address, tuple(command), str(folder), str(Path.cwd()), gpus_of(settings, client.nodes()),
        storage=storage, pip=pip,
    )  # fmt: skip
    if not dry:
        runs.keep(run)
    _start(client, run, ["--retries", str(retries), *(["--dry-run"] if dry else [])])
    return run


def resume(run: RemoteRun, retries: int) -> RemoteRun:
    """Start a run's job anew: it goes on from its folder there, or from its ``run.storage``.

    Args:
        run: the run.
        retries: how often its job starts it again after it died.

    Raises:
        ConfigError: the cluster does not answer, or the run goes on or is finished.
    """
    client = Client(run.address)
    try:
        status = client.status(run.submission)
    except UnknownJobError:
        status = "lost"
    if status in (WORDS["PENDING"], WORDS["RUNNING"]):
        raise ConfigError(f"{run.name} is not over: follow it by `hotloop submit logs -f`, or stop it first")
    if status == "finished" and run.command[0] != "hpo":  # a search may have ended with trials left
        raise ConfigError(f"{run.name} is finished: hotloop submit fetch {run.name}")
    again = dataclasses.replace(run, number=run.number + 1)
    runs.keep(again)
    storage = ["--storage", f"{run.storage.rstrip('/')}/{run.name}"] if run.storage else []
    _start(client, again, ["--retries", str(retries), "--again", *storage])
    return again


def _start(client: Client, run: RemoteRun, options: Sequence[str]) -> None:
    """Start a run's job: Ray shows its command on the dashboard."""
    line = ["python", "-m", "hotloop.remote.there", run.name, *options, "--", *run.command]
    environment: dict[str, Any] = {
        "working_dir": run.root,
        "excludes": list(LEFT_OUT),
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), SUBMITTED: run.name},
    }
    if run.pip:
        environment["pip"] = run.pip
    client.submit(shlex.join(line), environment, run.gpus, run.submission)


def check(command: Sequence[str]) -> Settings:
    """Return the settings of a command that a cluster can be asked to run.

    Raises:
        ConfigError: it is none of ``train``, ``hpo`` and ``kfold``, or a setting cannot be used.
    """
    verb, overrides = command[0] if command else "", list(command[1:])
    if verb not in VERBS:
        raise ConfigError(
            f"{shlex.join(command) or 'nothing'} stands behind --: expected train, hpo or kfold with its settings"
        )
    config = None
    if "--config" in overrides[:-1]:
        at = overrides.index("--config")
        config = Path(overrides[at + 1])
        del overrides[at : at + 2]
    for one in overrides:
        if one.startswith("-"):
            raise ConfigError(f"{one} behind --: expected settings; options of hotloop submit stand before --")
        if one.partition("=")[0].lstrip("+") in _CHOSEN:
            raise ConfigError(f"{one}: hotloop submit chooses the folder there; leave it out")
    found = configure.load_search(overrides, config) if verb == "hpo" else configure.load(overrides, config)
    place = found.recipe.name.rpartition(":")[0]
    for path in (place if place.endswith(".py") else "", config or ""):
        if path and not Path(path).resolve().is_relative_to(Path.cwd()):
            raise ConfigError(f"{path} is not below {Path.cwd()}, the folder that travels: start above it")
    return found


def gpus_of(settings: Settings, nodes: Sequence[Mapping[str, float]]) -> float:
    """Return how many GPUs the job takes of a node.

    Raises:
        ConfigError: no node has as many.
    """
    from hotloop.train.cluster import Cluster  # noqa: PLC0415

    if "ray" in (settings.hpo.engine, settings.kfold.engine):
        return 0  # its trials or folds take them
    wanted = Cluster(None, settings, tuple(nodes)).needs["num_gpus"]
    most = max((one.get("GPU", 0) for one in nodes), default=0)
    if wanted > most:
        raise ConfigError(
            f"the run needs {wanted:g} GPUs of one node, and the most that a node of the cluster has is {most:g}: set "
            "fewer run.devices, or run.device=cpu"
        )
    return wanted
