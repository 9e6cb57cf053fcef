"""What is found on a cluster: what is shown of it, what ends the command, and what is installed where hotloop is not."""

import io
import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hotloop.errors import ConfigError, DataError
from hotloop.remote import checking, environment, following, preflight, signed
from hotloop.remote.jobs import Answer, Jobs, Sent
from hotloop.version import __version__


@pytest.fixture
def facts():
    """What a machine like this one says of itself."""
    from hotloop.cache.keys import fits

    def made(**more):
        usual = {
            "digest": environment.digest(), "versions": {}, "python": platform.python_version(), "node": "gpu-1", "fits": fits(), "driver": "570.86",
            "kept": ["a", "b"], "findings": [], "place": "/there", "free_bytes": 2**40,
        }  # fmt: skip
        return {**usual, **more}

    return made


def shown(facts, *command):
    asked = checking.check(command or ("train", "train.py:make"))
    return "\n".join(preflight.Found(facts, {}).lines(asked, "1 bundle travels"))


COMPILED = ("train", "train.py:make", "training.optimization.use_torch_compile=true")


@pytest.mark.campaign
def test_what_a_person_should_know_of_a_cluster_is_shown(project, facts):
    said = shown(facts(findings=[{"level": "problem", "what": "no compiler", "remedy": "install g++"}]))
    assert "Node gpu-1: torch " in said
    assert "driver 570.86" in said
    assert "1 TiB free in /there" in said
    assert "problem: no compiler; install g++" in said
    full = facts(problem="No space left on device")
    full.pop("free_bytes")
    assert "no room in /there" in shown(full)
    assert "Compiled code: none is needed" in said


@pytest.mark.campaign
def test_compiled_code_that_fits_is_told_from_code_that_does_not(project, facts):
    here = facts()["fits"]
    assert "it fits there; 1 bundle travels" in shown(facts(), *COMPILED)
    assert "has and that fits: 2 bundles" in shown(facts(), *COMPILED)
    other = facts(fits={**here, "gpu": "NVIDIA H100 9.0", "torch": "1.0"})
    expected = f"none of here fits there: torch 1.0 (here {here['torch']}), gpu NVIDIA H100 9.0 (here {here['gpu']})"
    assert expected in shown(other, *COMPILED)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"python": "3.9.2"}, r"node gpu-1 has Python 3\.9\.2, and this machine 3\.\d+: .*; use the cluster's here"),
        ({"problem": "No space left on device"}, r"cannot keep the run in /there: No space left .*HOTLOOP_REMOTE_DIR"),
        ({"free_bytes": 2**28}, r"has 256 MiB free in /there, and the run needs 258 MiB at least: free the disk there"),
        ({"dry_run": {"code": 2, "said": "hotloop: no such column\n"}}, r"exit code 2:\nhotloop: no such column$"),
    ],
)
def test_what_is_in_the_way_ends_the_command(facts, more, said):
    with pytest.raises(ConfigError, match=said):
        preflight.Found(facts(**more), {}).refuse(2**20)
    preflight.Found(facts(dry_run={"code": 0, "said": ""}), {}).refuse(2**20)


# -- hotloop is installed where it is not -------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch, project):
    """Let the cluster answer as told, and return what it was sent."""

    def made(*left):
        left, sent = list(left), []

        def answer(self, what, name, *more):
            sent.append(more[1])
            return left.pop(0)

        monkeypatch.setattr(Jobs, "answer", answer)
        asked = checking.check(("train", "train.py:make"))
        return lambda: (preflight.look(Jobs(None, "key"), asked, Path("tree.zip"), print), sent)

    return made


@pytest.mark.campaign
@pytest.mark.parametrize("first", [None, "0"])
@pytest.mark.some_of(2)
def test_where_the_cluster_has_no_hotloop_or_another_this_one_is_installed(answers, facts, first, capsys):
    failed = "Job failed, last logs:\nTraceback\nModuleNotFoundError: No module named 'torch'\n"
    missing = Answer(first and facts(digest=first), failed, "n")
    found, sent = answers(missing, Answer(facts(), "", "n"))()
    assert [bool(one.pip) for one in sent] == [False, True]
    why = "no hotloop that answers (ModuleNotFoundError: No module named 'torch')"
    assert found.pip == sent[1].pip
    assert f"has {'another hotloop' if first else why}: hotloop {__version__} is installed" in capsys.readouterr().out


@pytest.mark.campaign
def test_a_job_that_fails_otherwise_is_told_with_what_it_said(answers, facts):
    with pytest.raises(ConfigError, match="could not: Failed to set up runtime environment"):
        answers(Answer(None, "Failed to set up runtime environment", "n", started=False))()
    with pytest.raises(ConfigError, match="could not: exit code 1"):
        answers(*2 * [Answer(None, "exit code 1", "n")])()


@pytest.mark.campaign
def test_pip_gets_the_versions_of_here_a_wheel_and_the_users_requirements():
    asked = environment.pip(requirements=True)["packages"]
    place = "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}"
    assert asked[:2] == [f"-c {place}/.hotloop-submit/constraints.txt", f"-r {place}/requirements.txt"]
    assert asked[2].startswith(f"{place}/.hotloop-submit/hotloop-{__version__}-py3-none-any.whl[")
    assert "train" in asked[2]
    assert "dev" not in asked[2].partition("[")[2].rstrip("]").split(",")
    assert len(environment.pip(requirements=False)["packages"]) == 2
    import torch

    versions = environment.constraints()
    assert f"torch=={torch.__version__.partition('+')[0]}" in versions
    assert not any(one.startswith("hotloop=") for one in versions)


def test_copies_that_packages_bring_are_no_versions_of_here(tmp_path, monkeypatch):
    """setuptools puts its own on Python's path once it is imported."""
    (tmp_path / "packaging-1.0.dist-info").mkdir()
    (tmp_path / "packaging-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: packaging\nVersion: 1.0\n"
    )
    before = environment.constraints()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path, str(tmp_path)])
    assert environment.constraints() == before
    assert any(one.startswith("packaging==") for one in before)


def test_the_wheel_is_this_hotloop_and_always_the_same(tmp_path):
    files = environment.files()
    (wheel,) = (data for name, data in files.items() if name.endswith(".whl"))
    assert wheel == environment.wheel()
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        names = archive.namelist()
        source = archive.read("hotloop/remote/there.py")
        about = archive.read(f"hotloop-{__version__}.dist-info/METADATA").decode()
    assert source == Path(environment.__file__).with_name("there.py").read_bytes()
    assert "hotloop/train/conf/hpo/default.yaml" in names
    assert not any("__pycache__" in name for name in names)
    assert f"\nVersion: {__version__}\n" in about


@pytest.mark.campaign
def test_pip_takes_what_it_is_given(tmp_path):
    """Ray writes the packages into a file of requirements, as here; where all is there, pip asks no index."""
    for name, data in environment.files().items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "requirements.txt").write_text("pytest\n")
    asked = environment.pip(requirements=True)["packages"]
    (tmp_path / "asked.txt").write_text("\n".join(asked))
    variables = {**os.environ, "RAY_RUNTIME_ENV_CREATE_WORKING_DIR": str(tmp_path)}
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--disable-pip-version-check"]
    said = subprocess.run(
        [*pip, "--dry-run", "-r", str(tmp_path / "asked.txt")],
        env=variables,
        check=False,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    assert f"hotloop-{__version__}" in said.stdout.splitlines()[-1]
    wheel = asked[-1].partition("[")[0].replace("${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}", str(tmp_path))
    subprocess.run([*pip, "--no-deps", "--target", str(tmp_path / "to"), wheel], check=True, capture_output=True)
    code = "import hotloop.remote.there as there; print(there.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path / "to")},
        check=True,
        text=True,
        capture_output=True,
    )
    assert found.stdout.strip() == str(tmp_path / "to/hotloop/remote/there.py")
    assert (tmp_path / "to/bin/hotloop").is_file()


# -- jobs ---------------------------------------------------------------------------------------------------------------


class Cluster:
    """Answers as Ray's client does."""

    def __init__(self, *logs, status="SUCCEEDED"):
        self.started, self.asked, self.left, self.status, self.stopped = [], [], list(logs), status, []

    def submit(self, *asked):
        self.started.append(asked)
        (file,) = Path(asked[1]["py_modules"][0]).iterdir()
        self.asked.append((file.stat().st_mode & 0o777, json.loads(file.read_text())))
        return "job"

    def stop(self, job):
        self.stopped.append(job)

    def job(self, submission):
        return type(
            "Details", (), {"status": self.status, "message": "it ended", "driver_node_id": "n", "driver_exit_code": 0}
        )

    def logs(self, submission):
        return self.left.pop(0)

    def follow(self, submission):
        for text in self.left.pop(0):
            if isinstance(text, Exception):
                raise text
            yield text


def test_the_key_and_the_command_are_in_a_file_and_not_in_what_ray_logs():
    cluster = Cluster(*2 * [signed.dumps("secret", {"a": 1})])
    jobs, command = Jobs(cluster, "secret", 2, "node"), ["hpo", "hpo.storage=postgresql://u:pw@h/db"]
    for _ in range(2):
        assert jobs.answer("check", "-", command, Sent(Path("t.zip"), {"packages": []})) == Answer({"a": 1}, "", "n")
    (line, made, *rest), _ = cluster.started
    assert line == "python -m hotloop.remote.there check -"
    assert "secret" not in str(made)
    assert "pw" not in str(made)
    assert made["working_dir"] == "t.zip"
    assert rest == [2, None, "node"]
    (mode, first), (_, second) = cluster.asked
    assert mode == 0o600
    assert (first["key"], first["command"]) == ("secret", command)
    assert first["once"] != second["once"]  # Ray keeps what it has: the first job has removed the file there
    assert not Path(made["py_modules"][0]).exists()


def test_a_job_that_nobody_waits_for_any_more_is_stopped(monkeypatch):
    """It would wait in the queue, and take a GPU later."""
    cluster = Cluster(status="PENDING")

    def interrupted(seconds):
        raise KeyboardInterrupt

    with pytest.raises(DataError, match="not over in 0 s"):
        Jobs(cluster, "secret", seconds=0).answer("find", "x")
    monkeypatch.setattr("hotloop.remote.jobs.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Jobs(cluster, "secret").answer("check", "-")
    assert cluster.stopped == ["job", "job"]


def test_a_log_that_nobody_signed_is_no_answer():
    answer = Jobs(Cluster(signed.dumps("other", {})), "secret").answer("link", "x")
    assert answer.document is None
    assert answer.said == "it ended"


@pytest.fixture
def follow(monkeypatch):
    def made(cluster):
        monkeypatch.setattr(following, "Client", lambda address: cluster)
        monkeypatch.setattr(following, "_PAUSE_SECONDS", 0)
        run = type("Run", (), {"address": "http://h:1", "submission": "job", "name": "RUN"})
        printed = []
        return following.print_log(run, following.Rest(printed.append), follow=True), "".join(printed)

    return made


def test_what_ray_says_of_its_own_work_is_not_printed(follow):
    told = (
        "2026-11-26 23:02:21,834\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
        "Running entrypoint for job hotloop-20261126-120000-abcd: python -m hotloop.remote.there run x\n"
        "Program train.py:make\n2026-11-26 23:02:22,001\tWARNING worker.py:1 -- the disk is full\n"
    )
    assert follow(Cluster([told]))[1].splitlines() == told.splitlines()[2:]


def test_a_connection_that_breaks_is_made_anew_and_nothing_is_printed_twice(follow):
    broken = DataError("gone")
    cluster = Cluster(["one\ntwo\n", broken], [broken], ["one\n", "two\nth", "ree\n"], status="FAILED")
    assert follow(cluster) == ("failed", "one\ntwo\nthree\n")


def test_a_connection_that_stays_broken_ends_the_printing_and_says_that_the_run_goes_on(follow):
    with pytest.raises(DataError, match=r"gone\. The run goes on without this command: hotloop submit logs -f RUN"):
        follow(Cluster(*20 * [[DataError("gone")]]))


@pytest.mark.parametrize(
    ("ran", "statuses", "ended"),
    [
        (True, ["RUNNING", "RUNNING", "STOPPED"], (True, "stopped")),
        (True, ["RUNNING", "SUCCEEDED"], (True, "finished")),  # it was at its end
        (True, ["RUNNING"] * 200, (True, "running")),
        (False, ["FAILED"], (False, "failed")),
    ],
)
def test_a_stop_is_asked_for_and_its_end_waited_for(monkeypatch, ran, statuses, ended):
    assert stopped(monkeypatch, ran, statuses) == (
        ended,
        ["RUN was asked to stop: it has 60 s to save a checkpoint"] * ran,
    )


def test_a_look_that_fails_does_not_end_the_wait_for_a_stop(monkeypatch):
    assert stopped(monkeypatch, True, ["RUNNING", DataError("broken"), "STOPPED"])[0] == (True, "stopped")
    with pytest.raises(DataError, match=r"broken\. Whether RUN has stopped, hotloop submit status RUN says"):
        stopped(monkeypatch, True, [DataError("broken")] * 200)


def stopped(monkeypatch, ran, statuses):
    """Stop a run whose cluster answers so; return how that ended, and what was said."""
    now, left = [0.0], iter(statuses)

    class Asked:
        def stop(self, submission):
            return ran

        def job(self, submission):
            answer = next(left)
            if isinstance(answer, Exception):
                raise answer
            return type("Details", (), {"status": answer})

    monkeypatch.setattr(following, "Client", lambda address: Asked())
    monkeypatch.setattr(following.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(following.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    said = []
    run = type("Run", (), {"address": "http://h:1", "submission": "job", "name": "RUN"})
    return following.stop(run, said.append), said
