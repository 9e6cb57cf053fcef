"""A run is noted before it is sent, and once; two that resume it, an answer that is lost, and a refusal."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from hotloop.errors import ConfigError, DataError
from hotloop.remote import fetch, package, preflight, runs, submitting, watching
from hotloop.remote.client import Node, RefusedError, UnknownJobError, UnreachableError
from hotloop.remote.locating import NowhereError, SilentError
from hotloop.remote.submitting import AnswerLostError
from hotloop.report.runs import FETCHED

NAME = "20261126-120000-abcd"


class Cluster:
    """Starts jobs, and says that those before it are over."""

    def __init__(self):
        self.started, self.error, self.known = [], None, {}

    def nodes(self):
        return [Node("node", {})]

    def submit(self, line, made, gpus, submission, node):
        self.started.append((submission, [one.folder for one in runs.known()]))
        if self.error:
            raise self.error
        self.known[submission] = "RUNNING"
        return submission

    def job(self, submission):
        if submission not in self.known:
            raise UnknownJobError("unknown")
        return type("Details", (), {"status": self.known[submission]})


@pytest.fixture
def cluster(monkeypatch, project):
    made = Cluster()
    monkeypatch.setattr(submitting, "Client", lambda address: made)
    monkeypatch.setattr(submitting.locating, "node_of", lambda client, run: "node")
    found = preflight.Found({"kept": [], "fits": {}}, {})
    monkeypatch.setattr(preflight, "look", lambda *_: found)
    for name in ("lines", "refuse"):
        monkeypatch.setattr(preflight.Found, name, lambda *_: ())
    return made


def submit(**more):
    return submitting.submit(submitting.Request("http://h:1", ["train", "train.py:make"], **more), print)


@pytest.fixture
def stopped(cluster):
    run = runs.RemoteRun(NAME, "http://h:1", f"hotloop-{NAME}", "k", ("train",), "/r", 1.0)
    runs.keep(run)
    cluster.known[run.submission] = "STOPPED"
    return run


def test_a_run_is_noted_with_its_folder_before_it_is_sent(cluster, tmp_path):
    """Else a page whose process is killed meanwhile says "not started", and starts it twice."""
    run = submit(folder=tmp_path / "mine")
    assert cluster.started == [(f"hotloop-{run.name}", [str(tmp_path / "mine")])]
    assert (run.folder, run.sent) == (str(tmp_path / "mine"), True)
    assert runs.find(None) == run


def test_what_the_cluster_refuses_leaves_nothing(cluster, stopped):
    cluster.error = RefusedError("413")
    with pytest.raises(RefusedError):
        submitting.resume(stopped, 0)
    assert runs.find(NAME) == stopped  # the former job stays known
    runs.forget(NAME)
    with pytest.raises(RefusedError):
        submit()
    assert runs.known() == []


def test_a_run_whose_answer_is_lost_is_known_and_said_to_go_on_perhaps(cluster, stopped):
    cluster.error = DataError("the connection broke")
    with pytest.raises(
        DataError, match=rf"the connection broke\. The run may have begun .* hotloop submit status {NAME}"
    ):
        submitting.resume(stopped, 1)
    assert (runs.find(NAME).submission, runs.find(NAME).sent) == (f"hotloop-{NAME}-2", False)
    runs.forget(NAME)
    with pytest.raises(DataError, match="hotloop submit status"):
        submit()
    assert len(runs.known()) == 1


def test_a_run_that_is_finished_is_not_resumed(cluster, stopped):
    cluster.known[stopped.submission] = "SUCCEEDED"
    with pytest.raises(ConfigError, match=rf"{NAME} is finished, and nothing is left to train: hotloop submit fetch"):
        submitting.resume(stopped, 0)
    assert cluster.started == []
    runs.keep(dataclasses.replace(stopped, command=("hpo",)))
    assert submitting.resume(stopped, 0).number == 2  # a search that ran out of time has trials left


def test_a_run_that_is_resumed_is_not_listed_as_killed(cluster, stopped, tmp_path):
    """The last fetch found it stopped, and lists ask no cluster."""
    run = dataclasses.replace(stopped, folder=str(tmp_path))
    runs.keep(run)
    submitting.resume(run, 0)
    assert not (tmp_path / FETCHED).exists()  # nothing was fetched of it
    cluster.known[runs.find(NAME).submission] = "STOPPED"
    fetch.note(run, "stopped", print)
    submitting.resume(run, 0)
    assert json.loads((tmp_path / FETCHED).read_text())["status"] == "waiting"


def test_two_that_resume_a_run_start_one_job(cluster, stopped):
    """Each has read the run before the other has resumed it."""
    errors, ready = [], threading.Barrier(2)

    def resume():
        ready.wait()
        try:
            submitting.resume(stopped, 0)
        except ConfigError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=resume) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [name for name, _ in cluster.started] == [f"hotloop-{NAME}-2"]
    assert len(errors) == 1
    assert "is not over" in errors[0]


# -- a run whose node is lost -------------------------------------------------------------------------------------------


class Ended:
    """A cluster whose jobs have all failed, on a node that leaves when it was looked at ``looks`` times."""

    def __init__(self, code, looks):
        self.code, self.looks = code, looks

    def job(self, submission):
        return type("Details", (), {"driver_node_id": "gone", "driver_exit_code": self.code})

    def nodes(self):
        self.looks -= 1
        return [Node("other", {})] + [Node("gone", {})] * (self.looks > 0)


@pytest.mark.parametrize(
    ("ended", "lost", "resumed"),
    [
        ("failed", (None, 3), [2, 1]),
        ("failed", (None, 1000), []),  # its job was killed: the node is there
        ("failed", (1, 0), []),  # the program failed before the node left
        ("stopped", (None, 0), []),
    ],
)
def test_a_run_whose_node_is_lost_is_resumed_as_often_as_it_may(monkeypatch, stopped, ended, lost, resumed):
    now, again, cluster = [0.0], [], Ended(*lost)
    monkeypatch.setattr(watching, "Client", lambda address: cluster)
    monkeypatch.setattr(watching.following, "print_log", lambda run, rest, follow: ended)
    monkeypatch.setattr(
        watching.submitting, "resume", lambda run, retries, say, from_storage: again.append(retries) or run
    )
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    said = []
    assert watching.watch(stopped, print, said.append, 2) == ended
    assert (again, len(said)) == (resumed, len(resumed))


class Told:
    """Logs that end, or break, one after the other; a time that waiting moves on; a head that answers from some time on."""

    def __init__(self, monkeypatch, run, logs, answers_from=0.0, joins_at=0.0):
        self.now, self.logs, self.answers_from, self.joins_at, self.again = 0.0, list(logs), answers_from, joins_at, []
        self.run, self.printed, self.said, self.errors = run, [], [], []
        self.away = UnreachableError("nobody answers there")
        monkeypatch.setattr(watching, "Client", self.client)
        monkeypatch.setattr(watching.following, "print_log", self.log)
        monkeypatch.setattr(watching.submitting, "resume", self.resume)
        monkeypatch.setattr(watching.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watching.time, "sleep", lambda seconds: setattr(self, "now", self.now + seconds))

    def client(self, address):
        if 0.0 < self.now < self.answers_from:
            raise self.away
        return Ended(None, 0)

    def log(self, run, rest, follow):
        texts, end = self.logs.pop(0)
        rest.begin()
        for text in texts:
            rest.tell(text)
        if isinstance(end, Exception):
            self.now += 1.0
            raise end
        return end

    def resume(self, run, retries, say, from_storage):
        if self.now < self.joins_at:
            raise self.errors.pop(0) if self.errors else NowhereError("no node has it")
        self.again.append((retries, from_storage))
        return run

    def watch(self, retries=2):
        return watching.watch(self.run, self.printed.append, self.said.append, retries)


def test_a_head_that_answers_again_is_followed_on_and_nothing_is_printed_twice(monkeypatch, stopped):
    logs = [(["step 1\n", "st"], DataError("it broke")), (["step 1\nstep 2\n", "step 3\n"], "finished")]
    told = Told(monkeypatch, stopped, logs, answers_from=1000.0)
    assert told.watch() == "finished"
    assert "".join(told.printed) == "step 1\nstep 2\nstep 3\n"
    assert (told.again, 1000.0 <= told.now < 1010.0) == ([], True)
    assert "it broke\nThe run may be lost. Waiting up to 60 minutes" in told.said[0]
    assert told.said[1:] == ["nobody answers there"]


def test_a_run_is_resumed_once_its_head_was_started_anew_and_its_node_has_joined(monkeypatch, stopped):
    logs = [
        (["step 1\n"], UnreachableError("nobody answers there")), ([], UnknownJobError("started anew")),
        (["step 1 again\n"], "finished"),
    ]  # fmt: skip
    told = Told(monkeypatch, stopped, logs, answers_from=60.0, joins_at=200.0)
    assert told.watch() == "finished"
    assert "".join(told.printed) == "step 1\nstep 1 again\n"
    assert (told.again, 200.0 <= told.now < 210.0) == ([(2, False)], True)
    assert "was started anew. The run is being resumed, which takes a minute. After this, 1 of 2 left" in told.said[1]


def test_a_new_head_may_take_a_while_to_answer_and_the_storage_is_taken_last(monkeypatch, stopped):
    """The node's disk has the newest checkpoint, and the node may join later."""
    told = Told(monkeypatch, stopped, [([], UnknownJobError("started anew")), ([], "finished")], joins_at=350.0)
    told.errors = [DataError("500"), SilentError("some could not be asked"), UnreachableError("away again")] * 10
    with pytest.raises(NowhereError):
        told.watch()
    told.now, told.logs, told.joins_at = 0.0, [([], UnknownJobError("started anew")), ([], "finished")], 299.0
    assert told.watch() == "finished"
    assert told.again == [(2, True)]


def test_a_run_that_another_command_has_resumed_is_followed(monkeypatch, stopped):
    logs = [([], UnknownJobError("started anew")), (["step 1\n"], "stopped")]
    told = Told(monkeypatch, stopped, logs)
    runs.keep(dataclasses.replace(stopped, number=stopped.number + 1))
    assert told.watch() == "stopped"
    assert told.again == []
    assert told.said[0].endswith("Another command has resumed the run")


def test_a_start_whose_answer_was_lost_is_followed_and_not_repeated(monkeypatch, stopped):
    told = Told(monkeypatch, stopped, [([], UnknownJobError("started anew")), (["step 1\n"], "finished")])

    def lost(run, retries, say, from_storage):
        runs.keep(dataclasses.replace(run, number=run.number + 1))
        told.again.append(retries)
        raise AnswerLostError("lost")

    monkeypatch.setattr(watching.submitting, "resume", lost)
    assert told.watch() == "finished"
    assert told.again == [2]


def test_a_run_that_its_cluster_does_not_know_at_first_is_not_resumed(monkeypatch, stopped):
    told = Told(monkeypatch, stopped, [])
    monkeypatch.setattr(Ended, "job", lambda self, submission: (_ for _ in ()).throw(UnknownJobError("anew")))
    with pytest.raises(
        UnknownJobError, match=f"what this command has seen running alone: hotloop submit resume {NAME}"
    ):
        told.watch()
    assert told.again == []


def test_a_quiet_run_is_followed_over_any_number_of_lost_connections(monkeypatch, stopped):
    logs = [(["step 1\n"], DataError("it broke"))] * 8 + [(["step 1\n", "step 2\n"], "finished")]
    told = Told(monkeypatch, stopped, logs)
    assert told.watch() == "finished"
    assert "".join(told.printed) == "step 1\nstep 2\n"


def test_a_head_that_never_answers_again_ends_the_command_after_an_hour(monkeypatch, stopped):
    told = Told(monkeypatch, stopped, [([], DataError("it broke")), ([], "finished")], answers_from=1e6)
    with pytest.raises(ConfigError, match="nobody answers there"):
        told.watch()
    assert 3600.0 <= told.now < 3700.0


def test_a_head_that_comes_back_with_another_ray_ends_the_command_at_once(monkeypatch, stopped):
    told = Told(monkeypatch, stopped, [([], DataError("it broke")), ([], "finished")], answers_from=1e6)
    told.away = ConfigError("the cluster has Ray 1.0")
    with pytest.raises(ConfigError, match=r"the cluster has Ray 1\.0"):
        told.watch()
    assert told.now < 10.0


def test_a_head_that_answers_and_tells_no_log_ends_the_command(monkeypatch, stopped):
    told = Told(monkeypatch, stopped, [([], DataError("404"))] * 10)
    with pytest.raises(DataError, match="404"):
        told.watch()
    assert len(told.logs) == 6


def test_a_head_that_is_lost_more_often_than_a_run_may_be_resumed_ends_the_command(monkeypatch, stopped):
    told = Told(monkeypatch, stopped, [([], UnknownJobError("started anew"))] * 2)
    with pytest.raises(UnknownJobError, match=r"--retries 1 is used up: go on by hotloop submit resume"):
        told.watch(retries=1)
    assert told.again == [(1, False)]


# -- what travels, and what is shown ------------------------------------------------------------------------------------


def test_a_password_in_a_setting_is_not_shown():
    command = ("hpo", "train.py:make", "hpo.storage=postgresql://u:p@w/x@h/db", "data.path=s3://b/a@c", "x=http://h:1")
    run = runs.RemoteRun(NAME, "http://h:1", "s", "k", command, "/r", 1.0)
    shown = ["hpo", "train.py:make", "hpo.storage=postgresql://***@h/db", "data.path=s3://b/a@c", "x=http://h:1"]
    assert run.shown == run.to_dict()["command"] == shown
    runs.keep(run)
    assert runs.find(NAME).command == command


@pytest.mark.parametrize(
    "name",
    [
        ".npmrc", ".envrc", ".pgpass", ".docker/config.json", ".aws/config", ".ssh/config", ".huggingface/token",
        "kaggle.json", "service-account.json", "key.p12", "secrets.yaml", ".streamlit/secrets.toml", "a/.kube/x",
    ],
)  # fmt: skip
def test_more_names_that_secrets_have_are_left_out(name):
    assert package.is_secret(name)


@pytest.mark.parametrize("name", ["train.py", "tokens.py", "secrets.py", "data/keys.csv", "docker/config.json"])
def test_names_of_programs_are_no_secrets(name):
    assert not package.is_secret(name)


def test_git_s_own_folder_travels_by_no_name(project):
    for name in (".git", ".git/config"):
        with pytest.raises(ConfigError, match=rf"--include {name}: \.git never travels"):
            package.collect(project, [name])


def test_submodules_travel_and_links_to_folders_are_listed(project, tmp_path):
    from ray_head import git

    other = tmp_path / "other"
    other.mkdir()
    git("-C", str(other), "init", "-q")
    (other / "inner.py").write_text("x")
    git("-C", str(other), "add", ".")
    git("-C", str(other), "commit", "-qm", "one")
    git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "sub")
    Path("real").mkdir()
    Path("link").symlink_to("real")
    git("add", "link")
    packed = package.collect(project)
    assert {"train.py", "sub/inner.py"} <= set(packed.files)
    assert packed.links == ("link",)
    assert any("no files of this folder: link " in line for line in packed.lines())
