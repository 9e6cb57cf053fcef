"""What is asked of a cluster: all over HTTP, at the port of its dashboard, by Ray's own client where it has one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import platform
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
_BLOCK, _MOST_ANSWER, _MOST_ERROR, _MOST_SAID = 2**20, 2**24, 300, 2000
_CHATTY = (
    "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env.packaging",
)  # fmt: skip
_VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Ray's client takes them before any address that it is given."""
OVER = {"SUCCEEDED": "finished", "FAILED": "failed", "STOPPED": "stopped"}
WORDS = {"PENDING": "waiting", "RUNNING": "running", **OVER}


class UnknownJobError(HotloopError):
    """The cluster does not know a job: its head was started anew since."""


class UnreachableError(ConfigError):
    """Nobody answers at a cluster's address, or nobody who is ready."""


class MissingFileError(DataError):
    """A node has no such file."""


class RefusedError(ConfigError):
    """The cluster refused a job: nothing was started."""


@dataclasses.dataclass(frozen=True)
class Node:
    """A node that is alive: Ray's name of it, which a start of Ray makes anew, and its resources."""

    name: str
    resources: Mapping[str, float]


class Client:
    """A connection to a cluster.

    Args:
        address: of its dashboard.

    Raises:
        UnreachableError: nobody answers there, or it is no Ray.
        ConfigError: it has another version of Ray, or asks for a token.
        MissingExtraError: Ray's client is not installed.
    """

    def __init__(self, address: str) -> None:
        # It would send statistics, unless it is told not to.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        jobs = require("ray.job_submission", "hotloop submit", "ray")
        self._http = require("requests", "hotloop submit", "ray")
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        self.address = address
        _probe(address)
        self.ray = self._version()
        with _without_variables():
            try:
                self._jobs = _bounded(jobs.JobSubmissionClient)(address)
            except Exception as error:  # Ray raises what it likes
                raise ConfigError(f"--address {address}: {describe(error)}") from error

    def _version(self) -> str:
        """Return the cluster's version of Ray, which has to be that of this machine."""
        import ray  # noqa: PLC0415 - an optional package

        try:
            there = str(self._document("/api/version")["ray_version"])
        except (DataError, ValueError, KeyError, TypeError) as error:
            if str(error).startswith(("/api/version: 401", "/api/version: 403")):
                raise ConfigError(
                    f"--address {self.address}: the cluster asks for its token, and took none from here: set "
                    "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to what it was started with"
                ) from error
            raise UnreachableError(
                f"--address {self.address}: what answers there is no Ray dashboard with a job server ({error}). "
                "Expected http://HEAD:8265, of a head started with pip install 'ray[default]'"
            ) from error
        if there != ray.__version__:
            raise ConfigError(
                f"--address {self.address}: the cluster has Ray {there}, and this machine {ray.__version__}: install "
                f"that one here (pip install 'ray[default]=={there}'), or this one on the cluster"
            )
        return there

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive.

        Raises:
            DataError: the cluster does not tell them.
        """
        asked = {"limit": "10000", "detail": "true", "timeout": str(int(_ANSWER_SECONDS))}
        try:
            rows = self._document("/api/v0/nodes", params=asked)["data"]["result"]["result"]
            alive = [one for one in rows if one["state"] == "ALIVE"]
            return [Node(str(one["node_id"]), dict(one.get("resources_total") or {})) for one in alive]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{self.address} was asked for its nodes, and told none: {describe(error)}") from error

    def submit(
        self, command: str, runtime_env: Mapping[str, Any], gpus: float, submission: str | None, node: str | None
    ) -> str:
        """Start a job, and return its name: the one that is given, or one that Ray makes.

        Args:
            command: that it runs.
            runtime_env: Ray's.
            gpus: that it takes of a node.
            submission: its name.
            node: that it has to run on; None leaves it to the cluster.

        Raises:
            RefusedError: nothing was started.
            DataError: the answer was lost: the job may have been started.
        """
        self._jobs.starting, self._jobs.code = False, 0
        try:
            with _asking("to start a job"):
                return str(
                    self._jobs.submit_job(
                        entrypoint=command,
                        runtime_env=dict(runtime_env),
                        entrypoint_num_gpus=gpus or None,
                        submission_id=submission,
                        entrypoint_label_selector={"ray.io/node-id": node} if node else None,
                    )
                )
        except DataError as error:
            if self._jobs.starting and not 400 <= self._jobs.code < 500:  # noqa: PLR2004 - HTTP's numbers for refusals
                raise
            raise RefusedError(str(error)) from error

    def job(self, submission: str) -> Any:
        """Return what Ray says of a job: ``status``, ``message``, ``driver_node_id``.

        Raises:
            UnknownJobError: it knows no such job.
        """
        with _asking("a job"):
            return self._jobs.get_job_info(submission)

    def logs(self, submission: str) -> str:
        """Return all that a job printed."""
        with _asking("a log"):
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
                with _asking("a log"):
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
            DataError: there is none, or the connection broke.
        """
        asked = {"node_id": node, "filename": path, "lines": "-1", "timeout": str(_FILE_SECONDS)}
        with self._get("/api/v0/logs/file", params=asked, stream=True) as answer:
            try:
                yield from answer.iter_content(_BLOCK)
            except OSError as error:  # requests' errors are all of this kind
                raise DataError(f"{path} cannot be read from {self.address}: {describe(error)}") from error

    def _document(self, path: str, **more: Any) -> Any:
        """Return a document that the cluster answers with."""
        with self._get(path, stream=True, **more) as answer:
            found = bytearray()
            try:
                for block in answer.iter_content(_BLOCK):
                    found += block
                    if len(found) > _MOST_ANSWER:
                        raise DataError(f"{self.address}{path} answers with more than {_MOST_ANSWER} bytes")
            except OSError as error:
                raise DataError(f"{self.address} does not answer: {describe(error)}") from error
        return json.loads(found)

    def _get(self, path: str, **more: Any) -> Any:
        """Ask for something; nobody leads this machine elsewhere by a redirection."""
        from ray._private.authentication.http_token_authentication import (  # noqa: PLC0415 - an optional package
            get_auth_headers_if_auth_enabled,
        )

        more = {"timeout": _ANSWER_SECONDS, "allow_redirects": False, "stream": True, **more}
        try:
            answer = self._http.get(f"{self.address}{path}", headers=get_auth_headers_if_auth_enabled({}), **more)
            if answer.status_code == 200:  # noqa: PLR2004 - HTTP's number
                return answer
            with answer:
                text = next(answer.iter_content(_MOST_ERROR), b"").decode(errors="replace")
        except OSError as error:
            raise DataError(f"{self.address} does not answer: {describe(error)}") from error
        said = f"{path}: {answer.status_code} {text[:_MOST_ERROR]}"
        raise (MissingFileError if "A file is not found" in said else DataError)(said)


def _bounded(base: Any) -> Any:
    """Return Ray's client with an end to each request: a tunnel whose other end is gone accepts, and never answers."""

    class Bounded(base):  # type: ignore[misc]
        starting, code = False, 0
        """Whether a job was asked for, and with which number the cluster answered that."""

        def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
            self.starting = self.starting or (method, endpoint) == ("POST", "/api/jobs/")
            seconds = _UPLOAD_SECONDS if more.get("data") else _ANSWER_SECONDS
            answer = super()._do_request(method, endpoint, **{"timeout": seconds, "allow_redirects": False, **more})
            if self.starting:
                self.code = answer.status_code
            return answer

    return Bounded


def python_here() -> str:
    """Return the version of Python that has to be the same there: its first two numbers."""
    return ".".join(platform.python_version_tuple()[:2])


def _probe(address: str) -> None:
    """Refuse an address that nobody answers, in seconds."""
    parts = urllib.parse.urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), _PROBE_SECONDS).close()
    except OSError as error:
        raise UnreachableError(
            f"--address {address}: nobody answers there ({error}). Start Ray there by `ray start --head`, or open a "
            "tunnel to it by `ssh -L 8265:127.0.0.1:8265 HEAD` and name http://127.0.0.1:8265"
        ) from error


@contextlib.contextmanager
def _without_variables() -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in _VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextlib.contextmanager
def _asking(what: str) -> Iterator[None]:
    """Turn what Ray's client raises into an error of ours."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        if "does not exist" in str(error):
            raise UnknownJobError(
                "the cluster does not know the run's job: its head was started anew since. `hotloop submit fetch` "
                "takes what its disk has, `hotloop submit resume` goes on"
            ) from error
        raise DataError(f"the cluster was asked {what}, and did not answer: {describe(error)[:_MOST_SAID]}") from error
    except Exception as error:  # aiohttp's and Ray's have no base of their own
        raise DataError(f"the cluster was asked {what}, and did not answer: {describe(error)[:_MOST_SAID]}") from error
