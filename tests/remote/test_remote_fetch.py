"""What comes back from a cluster, of which every answer is known: two clients, foreign lists, a folder that lives on."""

import hashlib
import json
import threading
import tracemalloc
from pathlib import Path

import pytest

from hotloop.errors import ConfigError, DataError
from hotloop.remote import fetch, listed, runs, signed
from hotloop.remote.client import MissingFileError, Node
from hotloop.report.runs import FETCHED
from hotloop.train.turn import folder_held

NAME = "20261126-120000-abcd"
KEY = "key"


class Cluster:
    """Answers as a cluster does that has the files of one run."""

    def __init__(self, files):
        self.status, self.document, self.before = "RUNNING", None, lambda name: None
        self.put(files)

    def put(self, files):
        """Keep these files, and a signed list of them."""
        self.files = {name: data if isinstance(data, bytes) else data.encode() for name, data in files.items()}
        entries = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in self.files.items()}
        self.document = {"files": entries, "state": {"ended": 1}}

    def job(self, submission):
        return type("Details", (), {"status": self.status, "driver_node_id": "node", "message": ""})

    def nodes(self):
        return [Node("node", {})]

    def read(self, node, path):
        name = path.removeprefix(f"hotloop-{NAME}/")
        self.before(name)
        if name == listed.INDEX:
            yield signed.dumps(KEY, self.document).encode()
        elif name in self.files:
            data = self.files[name]
            yield from (data[at : at + 2**20] for at in range(0, len(data), 2**20))
        else:
            raise MissingFileError(name)


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster({f"{NAME}/settings.yaml": "a", f"{NAME}/record.jsonl": "one\n"})
    monkeypatch.setattr(fetch, "Client", lambda address: made)
    return made


@pytest.fixture
def run(tmp_path):
    made = runs.RemoteRun(NAME, "http://h:1", f"hotloop-{NAME}", KEY, ("train",), str(tmp_path / "here" / NAME), 1.0)
    runs.keep(made)
    return made


def took(run):
    return fetch.fetch(run, "last", lambda line: None).files


def test_what_is_new_comes_and_nothing_comes_twice(cluster, run):
    assert set(took(run)) == {f"{NAME}/settings.yaml", f"{NAME}/record.jsonl"}
    assert took(run) == ()
    cluster.put({f"{NAME}/settings.yaml": "a", f"{NAME}/record.jsonl": "one\ntwo\n"})
    assert took(run) == (f"{NAME}/record.jsonl",)


def test_a_fetch_says_in_the_folder_how_the_run_was_doing(cluster, run):
    for status, word in (("RUNNING", "running"), ("FAILED", "failed")):
        cluster.status = status
        took(run)
        told = json.loads(Path(run.folder, FETCHED).read_text())
        assert (told["run"], told["address"], told["status"]) == (NAME, run.address, word)


def test_where_that_cannot_be_written_what_was_fetched_is_there_and_it_is_said(cluster, run):
    Path(run.folder, FETCHED, "x").mkdir(parents=True)
    said = []
    assert len(fetch.fetch(run, "last", said.append).files) == 2
    assert f"{FETCHED} cannot be written" in said[0]


def test_a_file_of_the_users_may_begin_as_those_of_a_fetch_do(cluster, run):
    cluster.put({f"{NAME}/submit-fold0.csv": "1,2"})
    assert took(run) == (f"{NAME}/submit-fold0.csv",)


def test_two_that_fetch_the_same_run_do_it_one_after_the_other(cluster, run):
    """Else both write into one file: a checkpoint of two halves that is said to be right."""
    cluster.put({f"{NAME}/checkpoints/last.pt": bytes(2**22)})
    inside, most, others = [], [], []

    def other():
        took(run)

    def slow(name):
        if name == listed.INDEX:
            inside.append(name)
            most.append(len(inside))
            if not others:
                others.append(threading.Thread(target=other))
                others[0].start()
                others[0].join(0.5)
            inside.pop()

    cluster.before = slow
    took(run)
    others[0].join()
    assert max(most) == 1
    assert len(most) > 1


def test_a_folder_in_which_a_process_trains_is_left_alone(cluster, run):
    took(run)
    cluster.put({f"{NAME}/record.jsonl": "one\ntwo\n"})
    folder = Path(run.folder)
    errors = []

    def other():
        try:
            took(run)
        except ConfigError as error:
            errors.append(str(error))

    import subprocess
    import sys

    hold = f"import sys; from pathlib import Path\nfrom hotloop.train.turn import folder_held\nwith folder_held(Path({run.folder!r})):\n print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        other()
        process.stdin.close()
    assert "trains there" in errors[0]
    assert (folder / "record.jsonl").read_text() == "one\n"
    other()
    assert (folder / "record.jsonl").read_text() == "one\ntwo\n"


def test_a_run_that_has_gone_on_here_is_not_overwritten(cluster, run):
    took(run)
    record = Path(run.folder, "record.jsonl")
    with folder_held(Path(run.folder)):
        record.write_text("one\nhere\n")
    cluster.put({f"{NAME}/record.jsonl": "one\nthere\n", f"{NAME}/checkpoints/last.pt": "old"})
    with pytest.raises(
        ConfigError, match=r"record\.jsonl is not what was fetched .* move the folder .* elsewhere first"
    ):
        took(run)
    assert record.read_text() == "one\nhere\n"
    assert not record.with_name("checkpoints").exists()


def test_a_search_whose_next_trials_ran_here_is_not_overwritten(cluster, run):
    took(run)
    record = Path(run.folder, "trials", "0001", "record.jsonl")
    record.parent.mkdir(parents=True)
    record.write_text("here\n")
    with pytest.raises(ConfigError, match=r"0001/record\.jsonl is not what was fetched .* elsewhere first"):
        took(run)


def test_a_database_comes_without_the_log_of_an_older_one(cluster, run):
    """SQLite puts what it finds in a log into the file beside it, whichever that is."""
    folder = Path(run.folder)
    cluster.put({f"{NAME}/study.db": "one", f"{NAME}/study.db-wal": "more"})
    took(run)
    assert (folder / "study.db-wal").read_text() == "more"
    cluster.put({f"{NAME}/study.db": "one and more"})
    assert took(run) == (f"{NAME}/study.db",)
    assert not (folder / "study.db-wal").exists()


def test_a_kill_while_a_record_is_fetched_is_no_other_record(cluster, run):
    took(run)
    cluster.put({f"{NAME}/record.jsonl": "one\ntwo\n", f"{NAME}/x": "x"})

    def killed(name):
        if name == f"{NAME}/x":
            raise KeyboardInterrupt

    cluster.before = killed
    with pytest.raises(KeyboardInterrupt):
        took(run)
    assert Path(run.folder, "record.jsonl").read_text() == "one\ntwo\n"
    cluster.before = lambda name: None
    cluster.put({f"{NAME}/record.jsonl": "one\ntwo\nthree\n", f"{NAME}/x": "x"})
    assert len(took(run)) == 2


@pytest.mark.parametrize(
    "name",
    [
        "../../x", "/x/y", "x", "", "other/x", f"{NAME}/../x", f"{NAME}/a\0b", f"{NAME}/{'a' * 300}", f"{NAME}\\x/y",
        f"{NAME}/run.lock", f"{NAME}/run.lock.json", f"{NAME}/ui-start.json", f"{NAME}/fold-1/ui-stop.json",
        f"{NAME}/stored.json", f"{NAME}/.x.part", f"{NAME}/submit-log.txt", f"{NAME}/submit-run.json",
    ],
)  # fmt: skip
def test_a_name_that_no_run_has_is_refused_before_anything_is_taken(cluster, run, name):
    cluster.document["files"][name] = [0, "0" * 64]
    with pytest.raises(DataError, match="names a file that cannot be"):
        took(run)
    assert not Path(run.folder, "settings.yaml").exists()


@pytest.mark.parametrize(
    "entry", [1, [1], [-1, "0" * 64], [1.5, "0" * 64], [True, "0" * 64], [1, "x"], [1, 1], ["1", ""]]
)
def test_a_size_or_checksum_that_is_none_is_refused(cluster, run, entry):
    cluster.document["files"][f"{NAME}/settings.yaml"] = entry
    with pytest.raises(DataError, match=r"what cannot be|is none"):
        took(run)


@pytest.mark.parametrize("document", [[], {"files": []}, {"files": {}, "state": 1}, None])
def test_a_list_that_is_none_is_refused(cluster, run, document):
    cluster.document = document
    with pytest.raises(DataError, match="is none; nothing is taken"):
        took(run)


def test_before_its_first_list_a_run_has_nothing_and_nobody_forged_it(cluster, run, monkeypatch):
    """Of a file that is not there Ray may send nothing."""
    monkeypatch.setattr(cluster, "read", lambda node, path: iter(()))
    assert took(run) == ()


def test_a_list_without_an_end_is_not_kept_in_memory(cluster, run, monkeypatch):
    def endless(node, path):
        while True:
            yield bytes(2**20)

    monkeypatch.setattr(cluster, "read", endless)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"the list of run .* has more than 16 MiB"):
            fetch._Reader(cluster, "node", run).index()
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_a_log_without_an_end_is_cut(cluster, run, monkeypatch):
    cluster.files[f"job-driver-{run.submission}.log"] = bytes(2**21)
    monkeypatch.setattr(fetch, "_MOST_LOG", 1000)
    took(run)
    assert Path(run.folder, fetch.LOG).stat().st_size == 1000


def test_what_the_disk_has_no_room_for_is_refused_at_once(cluster, run):
    cluster.document["files"][f"{NAME}/checkpoints/last.pt"] = [2**60, "0" * 64]
    with pytest.raises(ConfigError, match=r"what is to be fetched has .*: free the disk, or fetch fewer"):
        took(run)
    assert not Path(run.folder, "settings.yaml").exists()


# -- a run that is nowhere where it was ---------------------------------------------------------------------------------


class Nodes(Cluster):
    """A cluster of several nodes, of which some have a run."""

    def __init__(self, *names, having=()):
        super().__init__({})
        self.names, self.having, self.jobs, self.started = names, having, {}, []

    def nodes(self):
        return [Node(one, {"GPU": 1}) for one in self.names]

    def submit(self, line, made, gpus, submission, node):
        (file,) = Path(made["py_modules"][0]).iterdir()
        asked, what = json.loads(file.read_text()), line.split()[3]
        self.started.append((what, node, submission, gpus, asked))
        answer = {"there": node in self.having} if what == "find" else {}
        job = submission or f"job-{len(self.jobs)}"
        self.jobs[job] = node, signed.dumps(asked["key"], answer)
        return job

    def job(self, submission):
        from hotloop.remote.client import UnknownJobError

        if submission not in self.jobs:
            raise UnknownJobError("the cluster does not know it")
        found = {
            "status": "SUCCEEDED",
            "driver_node_id": self.jobs[submission][0],
            "message": "",
            "driver_exit_code": 0,
        }
        return type("Details", (), found)

    def logs(self, submission):
        return self.jobs[submission][1]


@pytest.fixture
def nodes(monkeypatch):
    from hotloop.remote import submitting

    def made(*names, having=()):
        cluster = Nodes(*names, having=having)
        for module in (fetch, submitting):
            monkeypatch.setattr(module, "Client", lambda address: cluster)
        return cluster

    return made


def test_a_run_goes_on_where_its_folder_is_and_only_there(nodes, run):
    from hotloop.remote import submitting

    cluster = nodes("head", "worker", having=("worker",))
    again = submitting.resume(run, 3)
    *_, (what, node, name, _, asked) = cluster.started
    assert (what, node, name) == ("run", "worker", f"hotloop-{NAME}-2")
    assert (asked["again"], asked["retries"], asked["key"]) == (True, 3, KEY)
    assert all(one["key"] != KEY for what, *_, one in cluster.started if what == "find")  # shown to no other node
    assert runs.find(NAME) == again
    assert (again.number, again.sent) == (2, True)


def test_a_run_that_is_on_no_node_is_not_begun_anew(nodes, run):
    from hotloop.remote import submitting
    from hotloop.remote.locating import NowhereError

    cluster = nodes("head", "worker")
    with pytest.raises(NowhereError, match=rf"no node of http://h:1 has run {NAME}, of 2 that were asked"):
        submitting.resume(run, 0)
    with pytest.raises(NowhereError):
        took(run)
    assert {what for what, *_ in cluster.started} == {"find"}
    assert runs.find(NAME) == run


def test_a_run_that_is_on_no_node_goes_on_from_its_storage(nodes, run, project):
    import dataclasses

    from hotloop.remote import submitting

    cluster, said = nodes("head"), []
    runs.keep(dataclasses.replace(run, storage="s3://b/c/", sent=True, root=str(project)))
    submitting.resume(run, 0, said.append)
    *_, (what, node, _, _, asked) = cluster.started
    assert (what, node, asked["storage"]) == ("run", None, f"s3://b/c/{NAME}")
    assert "goes on from s3://b/c/" in said[0]


def test_a_run_is_fetched_from_the_node_that_has_it_whichever_that_is(nodes, run):
    cluster = nodes("head", "worker", having=("worker",))
    cluster.put({f"{NAME}/settings.yaml": "a"})
    asked = []
    cluster.before = asked.append
    read = cluster.read
    cluster.read = lambda node, path: (asked.append(node), read(node, path))[1]
    assert took(run) == (f"{NAME}/settings.yaml",)
    assert "head" not in asked
    assert cluster.started[-1][:2] == ("link", "worker")
