"""Starts the jobs of ``hotloop.remote.there`` on a cluster, and reads their signed answers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import shlex
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.cache import files
from hotloop.errors import DataError, HotloopError
from hotloop.record import SUBMITTED
from hotloop.remote import signed, there
from hotloop.remote.client import OVER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hotloop.remote.client import Client

_POLL_SECONDS, _PATIENCE_SECONDS = 0.3, 10.0
STOP_SECONDS = 60
"""Which a run that is stopped has to save a checkpoint before Ray kills it."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """What travels with a job: its working folder as a zip file, what pip installs, and folders of modules."""

    archive: Path | None = None
    pip: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    modules: Sequence[Path] = ()


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a job answered.

    Args:
        document: that it signed; None where there is none.
        said: what else is known of it then.
        node: that it ran on.
        started: whether the job's program began; where it did not, the cluster could not make its environment.
    """

    document: Any
    said: str
    node: str
    started: bool = True


@dataclasses.dataclass(frozen=True)
class Jobs:
    """Starts jobs.

    Args:
        client: of the cluster.
        key: that signs what the jobs say.
        gpus: that each takes of a node.
        node: that they run on; None leaves it to the cluster.
        seconds: that an answer may take; None waits for room as long as it takes.
    """

    client: Client
    key: str
    gpus: float = 0
    node: str | None = None
    seconds: float | None = None

    def run(self, submission: str, name: str, command: Sequence[str], sent: Sent, **options: Any) -> None:
        """Start the job of a run under a name of ours; the options are those of `hotloop.remote.there.Asked`."""
        self._start(("run", name), {"command": [*command], **options}, sent, submission)

    def answer(
        self,
        what: str,
        name: str,
        command: Sequence[str] = (),
        sent: Sent | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Answer:
        """Start a job, wait until it is over, and return what it answered.

        Raises:
            DataError: the cluster does not answer, or the job takes longer than ``seconds``. It is stopped then.
        """
        job = self._start((what, name), {"command": [*command]}, sent or Sent())
        try:
            ended = self._wait(job, say)
        except BaseException:  # Ctrl-C as well: a job that waits would take a GPU later
            with contextlib.suppress(HotloopError):
                self.client.stop(job)
            raise
        try:
            document, said = signed.loads(self.key, self.client.logs(job)), ""
        except DataError as error:
            document, said = None, ended.message or str(error)
        return Answer(document, said, str(ended.driver_node_id), ended.driver_exit_code is not None)

    def _start(self, what: Sequence[str], asked: Mapping[str, Any], sent: Sent, submission: str | None = None) -> str:
        """Start a job. Ray logs and shows its command and variables, so the key and the arguments are in a file."""
        line = ["python", "-m", "hotloop.remote.there", *what]
        with tempfile.TemporaryDirectory(prefix="hotloop-submit-") as made:
            file = Path(made, there.ASKED, there.ASKED_FILE)
            # Ray keeps a folder that it was sent before, in which the file is gone: each is another.
            text = json.dumps({"key": self.key, "once": secrets.token_hex(16), **asked})
            files.replace(file, text.encode())
            environment: dict[str, Any] = {
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), SUBMITTED: what[1]},
                "py_modules": [str(file.parent), *(str(one) for one in sent.modules)],
            }
            if sent.archive:
                environment["working_dir"] = str(sent.archive)
            if sent.pip:
                environment["pip"] = dict(sent.pip)
            return self.client.submit(shlex.join(line), environment, self.gpus, submission, self.node)

    def _wait(self, job: str, say: Callable[[str], None]) -> Any:
        """Wait until a job is over, and return what Ray says of it; say so where it waits for room."""
        began, told = time.monotonic(), False
        while True:
            found = self.client.job(job)
            if str(found.status) in OVER:
                return found
            waited = time.monotonic() - began
            if self.seconds is not None and waited > self.seconds:
                raise DataError(f"a job of the cluster was not over in {self.seconds:.0f} s, and is stopped")
            if not told and waited > _PATIENCE_SECONDS and str(found.status) == "PENDING":
                say("The cluster has not started the job yet: it waits for a GPU, or its environment is installed")
                told = True
            time.sleep(_POLL_SECONDS)
