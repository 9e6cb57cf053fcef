"""Runs on a cluster without one: what is refused here, what is sent, and what of an answer is taken."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_folders import a_run

from hotloop.errors import ConfigError, DataError
from hotloop.remote import client, fetch, following, runs, submitting, there

NAME = "20260101-120000-abcd"
USUAL = ["train", "train.py:make", "run.accelerator=cpu"]


class Cluster:
    """A cluster whose jobs do nothing; ``back`` is what a run of it shows."""

    def __init__(self, back=None, status="running"):
        self.address, self.back, self.now, self.sent = "http://head:8265", back, status, []

    def __call__(self, address):
        self.address = address
        return self

    def nodes(self):
        return [{"CPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}]

    def submit(self, *told):
        self.sent.append(told)

    def job(self, submission):
        return SimpleNamespace(driver_node_id="node")

    def status(self, submission):
        return self.now

    def read(self, node, path):
        file = self.back / path.removeprefix(f"hotloop-{NAME}/")
        if not file.is_file():
            raise client.MissingFileError(path)
        yield file.read_bytes()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    made = Cluster(tmp_path / "back")
    for module in (submitting, fetch):
        monkeypatch.setattr(module, "Client", made)
    return made


def a_remote(tmp_path, **more):
    return runs.RemoteRun(NAME, "http://head:8265", tuple(USUAL), str(tmp_path / "here"), str(tmp_path), **more)


# -- what is sent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "expected train, hpo or kfold"),
        (["export", "x"], "expected train, hpo or kfold"),
        ([*USUAL, "--dry-run"], "options of hotloop submit stand before"),
        ([*USUAL, "run.folder=/x"], "leave it out"),
        ([*USUAL, "training.batch_size=x"], "training.batch_size"),
        (["train", f"{Path(__file__)}:make"], "is not below"),
        ([*USUAL, "--config", "../x.yaml"], "x.yaml"),
        (["train", "train.py:make", "run.accelerator=cuda", "run.devices=3"], "needs 3 GPUs of one node"),
    ],
)
def test_what_cannot_run_there_is_refused_here(project, cluster, command, said):
    Path("../x.yaml").write_text("run: {seed: 1}\n")
    with pytest.raises(ConfigError, match=said):
        submitting.submit(command, "http://head:8265")
    assert cluster.sent == []
    assert runs.known() == []


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("head", "http://head:8265"), ("https://head", "https://head:443"), ("http://[::1]:9", "http://[::1]:9"),
        ("http://me:secret@head", None), ("ftp://head", None), ("http://head:x", None), ("http://head/path", None),
    ],
)  # fmt: skip
def test_an_address_has_one_form(given, address):
    if address is None:
        with pytest.raises(ConfigError, match="expected the address of a Ray head"):
            runs.address(given)
    else:
        assert runs.address(given) == address


def test_a_run_is_sent_with_its_settings_and_without_secrets_and_is_remembered(project, cluster):
    with pytest.raises(ConfigError, match="no cluster is known"):
        submitting.submit(USUAL, None)
    compiled = [*USUAL, "training.optimization.use_torch_compile=true", "run.storage=file:///bucket/runs"]
    run = submitting.submit(compiled, "head", 3)
    (command, environment, gpus, submission) = cluster.sent[0]
    assert command == f"python -m hotloop.remote.there {run.name} --retries 3 -- {' '.join(compiled)}"
    assert environment["working_dir"] == str(project)
    assert {".env", "*.pem", "id_rsa*", ".git", "/runs"} <= {*environment["excludes"]}
    assert environment["env_vars"]["HOTLOOP_SUBMITTED"] == run.name
    assert (gpus, submission) == (0, run.submission)
    assert runs.find(None) == runs.find(run.name) == runs.find(run.folder) == run
    assert (runs.state_folder().stat().st_mode & 0o077) == 0
    cluster.now = "running"
    with pytest.raises(ConfigError, match="is not over"):
        submitting.resume(run, 0)
    cluster.now = "failed"
    again = submitting.resume(run, 0)
    assert runs.find(None) == again
    assert f"--again --storage file:///bucket/runs/{run.name} -- train" in cluster.sent[1][0]
    assert cluster.sent[1][3] != submission
    submitting.submit(["train", "train.py:make"], None)
    assert cluster.sent[2][2] == 1  # a node has GPUs


def test_a_dry_run_is_not_remembered_and_a_password_is_not_shown(project, cluster):
    submitting.submit([*USUAL, "hpo.storage=postgresql://me:secret@db/x"], "head", dry=True)
    assert "--dry-run" in cluster.sent[0][0]
    assert runs.known() == []
    run = submitting.submit([*USUAL, "hpo.storage=postgresql://me:secret@db/x"], "head")
    assert "secret" not in json.dumps(run.to_dict())


def test_nobody_answers_at_an_address():
    pytest.importorskip("ray.job_submission")
    with pytest.raises(ConfigError, match=r"nobody answers there .*ssh -L 8265"):
        client.Client("http://127.0.0.1:9")


# -- what is fetched ---------------------------------------------------------------------------------------------------


def listed(cluster, files):
    """Write files of a run as its job shows them."""
    index = {}
    cluster.back.mkdir(exist_ok=True)
    for name, content in files.items():
        path = cluster.back / NAME / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        index[name] = [len(content), hashlib.sha256(content).hexdigest()]
    (cluster.back / there.INDEX).write_text(json.dumps(index))


def test_what_is_new_is_fetched_with_the_checkpoints_that_are_asked_for(tmp_path, cluster):
    run = a_remote(tmp_path)
    assert fetch.fetch(run, "best").files == []  # it has not begun
    files = {"record.jsonl": b"1\n", "checkpoints/best.pt": b"best", "checkpoints/last.pt": b"last"}
    listed(cluster, files)
    assert fetch.fetch(run, "best").files == ["record.jsonl", "checkpoints/best.pt"]
    listed(cluster, {**files, "record.jsonl": b"1\n2\n"})
    (cluster.back / NAME / "record.jsonl").write_bytes(b"1\n2\n3\n")  # it has grown since
    assert fetch.fetch(run, "all").files == ["record.jsonl", "checkpoints/last.pt"]
    assert (tmp_path / "here" / "record.jsonl").read_bytes() == b"1\n2\n"
    (cluster.back / NAME / "checkpoints" / "best.pt").write_bytes(b"torn")
    (tmp_path / "here" / "checkpoints" / "best.pt").unlink()
    found = fetch.fetch(run, "best")
    assert (found.files, found.changing) == ([], ["checkpoints/best.pt"])
    assert not (tmp_path / "here" / "checkpoints" / "best.pt").exists()


def test_a_run_that_has_gone_on_here_is_not_overwritten(tmp_path, cluster):
    run = a_remote(tmp_path)
    listed(cluster, {"record.jsonl": b"1\n"})
    fetch.fetch(run, "best")
    here = tmp_path / "here" / "record.jsonl"
    here.write_bytes(b"1\nmine\n")
    listed(cluster, {"record.jsonl": b"1\n2\n"})
    with pytest.raises(ConfigError, match="has gone on here"):
        fetch.fetch(run, "best")
    assert here.read_bytes() == b"1\nmine\n"


@pytest.mark.parametrize(
    "index",
    [
        '{"../x": [1, "a"]}', '{"/etc/x": [1, "a"]}', '{"a\\\\b": [1, "a"]}', '{"ui-start.json": [1, "a"]}',
        '{"a/run.lock.json": [1, "a"]}', '{"": [1, "a"]}', '{"a": 3}', "[]", "{", '{"a\\u0000": [1, "a"]}',
    ],
)  # fmt: skip
def test_a_list_that_names_what_cannot_be_is_refused_whole(tmp_path, cluster, index):
    listed(cluster, {})
    (cluster.back / there.INDEX).write_text(index)
    with pytest.raises(DataError, match="nothing is taken"):
        fetch.fetch(a_remote(tmp_path), "all")


@pytest.mark.parametrize("known", [client.UnknownJobError("x"), DataError("x"), "failed"])
def test_how_a_run_is_doing(tmp_path, cluster, monkeypatch, known):
    def status(submission):
        if isinstance(known, Exception):
            raise known
        return known

    monkeypatch.setattr(cluster, "status", status)
    wanted = {client.UnknownJobError: "lost", DataError: "unreachable", str: "failed"}[type(known)]
    assert fetch.statuses([a_remote(tmp_path)]) == [wanted]


def test_a_log_is_read_on_where_the_connection_broke(tmp_path, cluster, monkeypatch):
    answers = [["one\n", "two\n"], ["one\n", "two\nthree\n"]]

    def follow(submission):
        yield from answers.pop(0)
        if answers:
            raise DataError("it broke")

    monkeypatch.setattr(following, "Client", cluster)
    monkeypatch.setattr(following, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(cluster, "follow", follow, raising=False)
    said = []
    cluster.now = "finished"
    assert following.print_log(a_remote(tmp_path), said.append, follow=True) == "finished"
    assert "".join(said) == "one\ntwo\nthree\n"


# -- the job -----------------------------------------------------------------------------------------------------------


def arguments(tmp_path, monkeypatch, verb="train", **more):
    monkeypatch.setenv("HOTLOOP_REMOTE_DIR", str(tmp_path / "there"))
    run = there.Run(NAME, [verb, "a=b"], **more)
    return run.folder, run._arguments()


def test_a_job_begins_a_run_or_goes_on_with_what_is_there_or_stored(tmp_path, monkeypatch):
    folder, begun = arguments(tmp_path, monkeypatch)
    assert begun == ["train", "a=b", f"run.folder={folder}"]
    assert arguments(tmp_path, monkeypatch, "hpo")[1] == ["hpo", "a=b", f"hpo.folder={folder}"]
    stored = arguments(tmp_path, monkeypatch, storage="s3://bucket/x", again=True)[1]
    assert (stored[0], "s3://bucket/x" in stored[1]) == ("train", True)
    (a_run(folder) / "settings.yaml").write_text("")
    again = arguments(tmp_path, monkeypatch, storage="s3://bucket/x", again=True)[1]
    assert (again[0], str(folder) in again[1]) == ("train", True)
    with pytest.raises(DataError, match="this node has no run"):
        there.Run("20260101-120000-ffff", ["train"], again=True).prepare()


@pytest.mark.parametrize(("codes", "retries", "ended"), [([9, 0], 3, 0), ([9, 9], 1, 9), ([2], 3, 2), ([-9], 0, 137)])
def test_a_job_starts_its_run_again_where_it_dies(tmp_path, monkeypatch, codes, retries, ended):
    monkeypatch.setenv("HOTLOOP_REMOTE_DIR", str(tmp_path))
    left = [*codes]
    run = there.Run(NAME, ["train"])
    run._back.mkdir(parents=True)
    monkeypatch.setattr(run, "_attempt", lambda: left.pop(0))
    assert run.train(retries) == ended
    assert left == []
    assert json.loads((run._back / there.INDEX).read_text()) == {}


def test_a_link_or_a_lock_in_a_runs_folder_is_not_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_REMOTE_DIR", str(tmp_path))
    run = there.Run(NAME, ["train"])
    a_run(run.folder)
    (run.folder / "secret").symlink_to("/etc/hostname")
    (run.folder / "run.lock.json").write_text("{}")
    run._write_index()
    names = json.loads((run._back / there.INDEX).read_text())
    assert "record.json" in names
    assert not {"secret", "run.lock.json"} & {*names}
