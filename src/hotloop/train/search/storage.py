"""Where a study is kept: SQLite in its folder, or a PostgreSQL server that several machines share."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, SearchStoppedError
from hotloop.train.optional import require
from hotloop.train.turn import LOCKED_SECONDS, turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import optuna

FILE = "study.db"
PATIENCE_SECONDS = 60.0
"""How long what matters is tried again while the storage does not answer."""


class Storage:
    """One storage, and whose turn it is to change the study in it.

    Args:
        url: ``sqlite:///file`` or ``postgresql://user@host/database``; None is SQLite in ``folder``.
        folder: the study's.
        heartbeat_seconds: how often a worker that runs a trial says that it lives.

    Raises:
        ConfigError: a URL of another kind.
        SearchStoppedError: the storage cannot be reached.
    """

    def __init__(self, url: str | None, folder: Path, heartbeat_seconds: int) -> None:
        self._optuna: Any = require("optuna", "hotloop hpo", "search")
        self._sql: Any = require("sqlalchemy", "hotloop hpo", "search")
        url = url or default_url(folder)
        try:
            parsed = self._sql.engine.make_url(url)
        except self._sql.exc.ArgumentError as error:
            raise ConfigError(f"hpo.storage: {error}; expected postgresql://user@host/database, or null") from error
        self.shown = masked(url)
        self.errors = (self._optuna.exceptions.StorageInternalError, self._sql.exc.SQLAlchemyError, sqlite3.Error)
        self._file = self._sqlite_file(parsed)
        if parsed.get_backend_name() == "postgresql":
            require("psycopg", "hpo.storage=postgresql://...", "postgres")
            parsed = parsed.set(drivername="postgresql+psycopg")
        self._url = parsed.render_as_string(hide_password=False)
        self._heartbeat = heartbeat_seconds
        self.optuna = self._opened()

    def study(self, name: str, directions: list[str]) -> optuna.Study:
        """Return the study of a name, which is made where it is not there yet."""
        with self.turn():
            study: optuna.Study = self._optuna.create_study(
                study_name=name, storage=self.optuna, directions=directions, load_if_exists=True
            )
        return study

    def renewed(self, study: optuna.Study, directions: list[str]) -> optuna.Study:
        """Delete a study and return an empty one of its name; it has to be the caller's turn."""
        name = study.study_name
        self._optuna.delete_study(study_name=name, storage=self.optuna)
        made: optuna.Study = self._optuna.create_study(study_name=name, storage=self.optuna, directions=directions)
        return made

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Be the only one who takes, ends or gives up trials; the turn of a process that dies ends with it.

        Raises:
            SearchStoppedError: nobody else gave the turn back for a minute.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._sqlite_turn() if self._file else self._postgresql_turn())
            except self.errors as error:
                raise self.gone(error) from error
            yield

    def beat(self, trial_id: int) -> None:
        """Say that whoever runs a trial lives."""
        self.optuna.record_heartbeat(trial_id)

    def gone(self, error: BaseException) -> SearchStoppedError:
        """Put a failure of the storage into words."""
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        kept = "Finished trials are kept: once it answers again (or has room), the same command goes on"
        if "not a database" in reason or "malformed" in reason:  # as SQLite says of a damaged file
            kept = "Put a copy of it back, or search anew with another hpo.folder (study.json keeps what was found)"
        return SearchStoppedError(f"the storage {self.shown} does not answer: {reason}. {kept}")

    def patiently(self, what: Callable[[], Any], say: Callable[[str], None], seconds: float = PATIENCE_SECONDS) -> Any:
        """Do what matters, again and again while the storage does not answer.

        Raises:
            SearchStoppedError: it did not answer for so many seconds.
        """
        began, wait = time.monotonic(), 0.1
        while True:
            try:
                return what()
            except (*self.errors, SearchStoppedError) as error:
                if time.monotonic() - began + wait > seconds:
                    raise (error if isinstance(error, SearchStoppedError) else self.gone(error)) from error
                say(f"The storage {self.shown} does not answer; trying again for {seconds:.0f} s")
            time.sleep(wait)
            wait = min(5.0, 2 * wait)

    @contextlib.contextmanager
    def let_go_on_failure(self) -> Iterator[None]:
        """Close, whatever fails in the block: nobody else would have the connections.

        Raises:
            SearchStoppedError: the storage failed.
        """
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, self.errors):
                raise self.gone(error) from error
            raise

    def close(self) -> None:
        """Let go of the connections."""
        self.optuna.remove_session()
        self.optuna.engine.dispose()

    def _sqlite_file(self, parsed: Any) -> Path | None:
        kind = parsed.get_backend_name()
        if kind == "postgresql" or (kind == "sqlite" and parsed.database and parsed.database != ":memory:"):
            return Path(parsed.database) if kind == "sqlite" else None
        raise ConfigError(
            f"hpo.storage={self.shown}: expected postgresql://user@host/database, sqlite:///file, or null for SQLite "
            "in the study's folder"
        )

    def _opened(self) -> Any:
        """Connect, and make the tables where there are none."""
        options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
        try:
            if self._file:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.closing(sqlite3.connect(self._file, timeout=LOCKED_SECONDS)) as file:
                    file.execute("PRAGMA journal_mode=WAL")  # readers go on while somebody writes; kept in the file
                options = {"connect_args": {"timeout": LOCKED_SECONDS}}
            with self._alone(), warnings.catch_warnings():
                warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
                made = self._optuna.storages.RDBStorage(
                    self._url, engine_kwargs=options, heartbeat_interval=self._heartbeat
                )
        except (*self.errors, OSError) as error:
            raise self.gone(error) from error
        if self._file:
            self._sql.event.listen(made.engine, "connect", _without_waiting)
            made.engine.dispose()  # those that are open wait for the disk at each commit
        return made

    def _alone(self) -> contextlib.AbstractContextManager[Any]:
        """Keep others from making the same tables at the same time."""
        if self._file:
            return self._sqlite_turn()
        engine = self._sql.create_engine(self._url, connect_args={"connect_timeout": 10}, poolclass=self._sql.NullPool)
        return self._locked(engine)

    @contextlib.contextmanager
    def _sqlite_turn(self) -> Iterator[None]:
        """Hold the lock of a file beside the study's.

        Raises:
            sqlite3.Error: nobody gave it back for a minute, or the study's file was deleted.
        """
        assert self._file is not None
        # Open connections would write into what nobody can read any more, without an error.
        if not self._file.is_file():
            raise sqlite3.OperationalError("its file is not there any more")
        with turn(self._file.with_name(f"{self._file.name}.turn")):
            yield

    def _postgresql_turn(self) -> contextlib.AbstractContextManager[Any]:
        return self._locked(self.optuna.engine)

    @contextlib.contextmanager
    def _locked(self, engine: Any) -> Iterator[None]:
        """Hold one of PostgreSQL's advisory locks: the server ends it with the transaction, as that with its client."""
        with engine.connect() as connection:
            connection.execute(self._sql.text(f"SET LOCAL lock_timeout = '{LOCKED_SECONDS}s'"))
            connection.execute(self._sql.text("SELECT pg_advisory_xact_lock(hashtextextended('hotloop hpo', 0))"))
            try:
                yield
            finally:
                with contextlib.suppress(*self.errors):
                    connection.rollback()


def _without_waiting(connection: Any, _: Any) -> None:
    """Let the disk write a commit when it comes to it: a trial has some forty, and each would wait for the disk.

    With a write-ahead log the file stays whole, and a killed process loses nothing. A power cut may lose the last
    commits: a trial that only lost its end has it in its folder, and one that is lost as a whole is run again. Some
    file systems have no such log, and there each commit waits.
    """
    if connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
        connection.execute("PRAGMA synchronous=NORMAL")


def default_url(folder: Path) -> str:
    """Return the URL of the file that a study has in its own folder."""
    return f"sqlite:///{folder.resolve() / FILE}"


def masked(url: str) -> str:
    """Return a URL as it may be shown and written down: without its password."""
    return re.sub(r"([?&]password=)[^&]*", r"\1***", re.sub(r"(://[^/@:]*):[^@]*@", r"\1:***@", url))
