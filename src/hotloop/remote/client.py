"""What is asked of a cluster: all over HTTP, at the port of its dashboard, by Ray's own client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import urllib.parse
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, DataError, HotloopError, describe
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PROBE_SECONDS, _ANSWER_SECONDS, _UPLOAD_SECONDS, _FILE_SECONDS = 5.0, 60.0, 600.0, 3600
_SILENT_SECONDS = 60.0
"""Of a log that is followed: then the connection is made anew, since nothing tells a quiet run from a dead tunnel."""
_OK = 200
_VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Ray's client takes them before any address that it is given."""
OVER = {"SUCCEEDED": "finished", "FAILED": "failed", "STOPPED": "stopped"}
WORDS = {"PENDING": "waiting", "RUNNING": "running", **OVER}


class UnknownJobError(HotloopError):
    """The cluster does not know a job: its head was started anew since."""


class MissingFileError(DataError):
    """A node has no such file."""


class Client:
    """A connection to a cluster.

    Args:
        address: of its dashboard, ``http://HOST:PORT``.

    Raises:
        ConfigError: nobody answers there, or no Ray of this version.
        MissingExtraError: Ray's client is not installed.
    """

    def __init__(self, address: str) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        jobs = require("ray.job_submission", "hotloop submit", "ray")
        self._http = require("requests", "hotloop submit", "ray")
        logging.getLogger("ray").setLevel(logging.WARNING)
        self.address = address
        _probe(address)
        kept = {name: os.environ.pop(name) for name in _VARIABLES if name in os.environ}
        try:
            self._jobs = _bounded(jobs.JobSubmissionClient)(address)
            there = str(self._get("/api/version").json()["ray_version"])
        except Exception as error:  # Ray raises what it likes
            raise ConfigError(
                f"--address {address}: {describe(error)}. Expected the dashboard of a head of ray[default]; one that "
                "asks for a token takes RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
            ) from error
        finally:
            os.environ.update(kept)
        here = require("ray", "hotloop submit", "ray").__version__
        if there != here:
            raise ConfigError(
                f"--address {address}: the cluster has Ray {there}, and this machine {here}: install the same on both"
            )

    def nodes(self) -> list[Mapping[str, float]]:
        """Return the resources of each node that is alive."""
        with _asking("for its nodes"):
            asked = {"limit": "10000", "detail": "true"}
            rows = self._get("/api/v0/nodes", params=asked).json()["data"]["result"]["result"]
            return [one.get("resources_total") or {} for one in rows if one["state"] == "ALIVE"]

    def submit(self, command: str, runtime_env: Mapping[str, Any], gpus: float, submission: str) -> None:
        """Start a job.

        Args:
            command: that it runs.
            runtime_env: Ray's.
            gpus: that it takes of a node.
            submission: its name.

        Raises:
            DataError: the cluster refuses it, or its answer was lost: the job may have been started.
        """
        with _asking("to start a job"):
            self._jobs.submit_job(
                entrypoint=command, runtime_env=dict(runtime_env), entrypoint_num_gpus=gpus or None,
                submission_id=submission,
            )  # fmt: skip

    def job(self, submission: str) -> Any:
        """Return what Ray says of a job: ``status``, ``message``, ``driver_node_id``.

        Raises:
            UnknownJobError: it knows no such job.
        """
        with _asking("for a job"):
            return self._jobs.get_job_info(submission)

    def status(self, submission: str) -> str:
        """Return how a job is doing, in our words."""
        return WORDS[str(self.job(submission).status)]

    def logs(self, submission: str) -> str:
        """Return all that a job printed."""
        with _asking("for a log"):
            return str(self._jobs.get_job_logs(submission))

    def stop(self, submission: str) -> bool:
        """Ask a job to end, and return whether it ran."""
        with _asking("to stop a job"):
            return bool(self._jobs.stop_job(submission))

    def follow(self, submission: str) -> Iterator[str]:
        """Yield what a job prints, from its first line on, until it is over or says nothing for a while."""
        tail = self._jobs.tail_job_logs(submission)
        loop = asyncio.new_event_loop()
        try:
            while True:
                with _asking("for a log"):
                    try:
                        text = loop.run_until_complete(asyncio.wait_for(anext(tail), _SILENT_SECONDS))
                    except (StopAsyncIteration, TimeoutError):
                        return
                yield text
        finally:
            loop.run_until_complete(tail.aclose())
            loop.close()

    def read(self, node: str, path: str) -> Iterator[bytes]:
        """Yield a file below a node's folder of logs.

        Raises:
            MissingFileError: there is none.
            DataError: the connection broke.
        """
        asked = {"node_id": node, "filename": path, "lines": "-1", "timeout": str(_FILE_SECONDS)}
        with _asking(f"for {path}"), self._get("/api/v0/logs/file", params=asked, stream=True) as answer:
            yield from answer.iter_content(2**20)

    def _get(self, path: str, **more: Any) -> Any:
        more = {"timeout": _ANSWER_SECONDS, "allow_redirects": False, **more}
        # Ray's own request would hold a whole checkpoint in memory; its headers have the token of the cluster.
        answer = self._http.get(f"{self.address}{path}", headers=self._jobs._headers, **more)  # noqa: SLF001
        if answer.status_code == _OK:
            return answer
        said = f"{path}: {answer.status_code} {answer.text[:300]}"
        raise (MissingFileError if "A file is not found" in said else DataError)(said)


def _bounded(base: Any) -> Any:
    """Return Ray's client with an end to each request: a tunnel whose other end is gone accepts, and never answers."""

    class Bounded(base):  # type: ignore[misc]
        def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
            seconds = _UPLOAD_SECONDS if more.get("data") else _ANSWER_SECONDS
            return super()._do_request(method, endpoint, **{"timeout": seconds, "allow_redirects": False, **more})

    return Bounded


def _probe(address: str) -> None:
    """Refuse an address that nobody answers, in seconds."""
    parts = urllib.parse.urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), _PROBE_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"--address {address}: nobody answers there ({error}). Start Ray there by `ray start --head`, or open a "
            "tunnel to it by `ssh -L 8265:127.0.0.1:8265 HEAD` and name http://127.0.0.1:8265"
        ) from error


@contextlib.contextmanager
def _asking(what: str) -> Iterator[None]:
    """Turn what Ray's client raises into an error of ours."""
    try:
        yield
    except HotloopError:
        raise
    except Exception as error:  # aiohttp's, requests' and Ray's have no base of their own
        if "does not exist" in str(error):
            raise UnknownJobError(
                "the cluster does not know the run's job: its head was started anew since. `hotloop submit resume` "
                "goes on from the run's folder there, or from run.storage"
            ) from error
        raise DataError(f"the cluster was asked {what}, and did not answer: {describe(error)[:2000]}") from error
