"""Trials on a Ray cluster of several nodes are those of one worker here; whatever is killed, none is lost or run twice."""

import collections
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("ray")
from ray_cluster import children, nodes
from shared import free_port, is_gone, once

from hotloop.errors import ConfigError, MissingExtraError
from hotloop.train import cluster as clusters
from hotloop.train.child import WorkerLostError
from hotloop.train.search import document, supervise
from hotloop.train.search.away import Away
from hotloop.train.search.told import TrialEnded
from hotloop.train.search.trial import Asked

CPU = {"CPU": 2.0}


# -- what is wrong is told before work starts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "127.0.0.1:1",
            r"engine\.address=127\.0\.0\.1:1: nobody answers there .*ray start --head.*leave hpo\.engine out",
        ),
        ("ray://127.0.0.1:1", r"engine\.address=ray://127\.0\.0\.1:1: nobody answers there"),
        ("head", r"engine\.address=head: expected auto, HOST:PORT \(6379\) or ray://HOST:PORT"),
        ("auto", r"engine\.address=auto: no Ray runs on this machine"),
    ],
)
def test_an_address_that_nobody_answers_is_told_and_nothing_is_written(compose, tmp_path, address, said, monkeypatch):
    from ray._private import services

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # Ray writes there which cluster was started last
    monkeypatch.setattr(services, "_find_address_from_flag", lambda _: set())  # and asks each process of this machine
    with pytest.raises(ConfigError, match=said):
        supervise.search(compose(hpo__engine="ray", engine__address=address), print)
    assert not (tmp_path / "study").exists()


def test_a_machine_without_ray_is_told_what_to_install(compose, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingExtraError, match=r"hpo\.engine=ray needs ray: install it with pip install 'hotloop\[ray\]'"
    ):
        supervise.search(compose(hpo__engine="ray"), print)


@pytest.mark.parametrize(
    ("nodes", "more", "said"),
    [
        ([CPU], {"run__device": "cuda"}, r"run\.device=cuda needs 1 GPUs, and no node of the cluster has as many"),
        ([CPU], {"engine__num_gpus": 0.5}, r"engine\.num_gpus=0\.5: no node .* the most is 0"),
        (
            [CPU, {"CPU": 2, "GPU": 1}],
            {"engine__num_gpus": 2},
            r"engine\.num_gpus=2: .*set engine\.num_gpus=1 or lower",
        ),
        ([CPU], {"engine__num_cpus": 3}, r"engine\.num_cpus=3: .*set engine\.num_cpus=2 or lower"),
        ([CPU, {"GPU": 1}], {"engine__num_gpus": 1}, r"engine\.num_cpus=1 and engine\.num_gpus=1: no node .* has both"),
        ([CPU], {"run__device": "cuda:1"}, r"run\.device=cuda:1 with hpo\.engine=ray: Ray chooses the GPU"),
    ],
)
def test_a_cluster_without_what_a_trial_needs_is_told(compose, nodes, more, said):
    with pytest.raises(ConfigError, match=said):
        clusters.Cluster(None, "hpo.engine", compose(hpo__engine="ray", **more), tuple(nodes)).check()


@pytest.mark.parametrize(
    ("nodes", "more", "room", "gpus"),
    [
        ([CPU, CPU], {}, 4, 0),
        ([CPU, CPU], {"engine__num_cpus": 1.5}, 2, 0),
        ([{"CPU": 8, "GPU": 4}, CPU], {}, 4, 1),
        ([{"CPU": 8, "GPU": 4}], {"engine__num_gpus": 0.5}, 8, 0.5),
        ([{"CPU": 8, "GPU": 4}], {"run__device": "cpu"}, 8, 0),
    ],
)
def test_auto_workers_are_as_many_as_there_is_room_for(compose, nodes, more, room, gpus):
    found = clusters.Cluster(None, "hpo.engine", compose(hpo__engine="ray", **more), tuple(nodes))
    found.check()
    assert found.room == room
    assert found.needs["num_gpus"] == gpus


def test_what_the_cluster_is_does_nothing_without_it(compose):
    from hotloop.train.search import before

    with pytest.raises(
        ConfigError, match=r"engine\.num_cpus=2.* no effect while hpo\.engine=local and kfold\.engine=local"
    ):
        before.check(compose(engine__num_cpus=2))


@pytest.mark.parametrize("after", [None, WorkerLostError("lost"), {"values": [1.0]}, "it waits for a node"])
def test_a_worker_that_was_interrupted_takes_no_other_trial(compose, tmp_path, after):
    """Whatever its trial comes to: a worker of a killed command went on, with trials that the next command missed."""
    said = [KeyboardInterrupt()] if isinstance(after, str) else [KeyboardInterrupt(), after]

    class Child:
        waits = isinstance(after, str)

        def hear(self):
            if isinstance(what := said.pop(0), BaseException):
                raise what
            return what

        send = interrupt = lambda *_: None

    stopped = []
    settings = compose(hpo__engine="ray")
    asked = Asked(0, settings, {}, tmp_path, print, stop=lambda: stopped.append(True))
    objective = Away(None, "", tmp_path / "log")
    objective.child = Child()
    if isinstance(after, dict):
        assert objective(asked) == [1.0]
        assert stopped
    else:
        with pytest.raises(KeyboardInterrupt):
            objective(asked)


# -- a cluster of three nodes ------------------------------------------------------------------------------------------

campaign = pytest.mark.campaign


@pytest.fixture
def three():
    with nodes(1, 1, 1) as made:
        yield made


@pytest.fixture
def away(search, three):
    """Search on the cluster."""
    return lambda objective, **named: search(
        objective, hpo__engine="ray", engine__address=three.address, **{"hpo__workers": "auto", **named}
    )


def values(ended):
    """The values and the result of each trial that is complete, by its number; none is complete twice."""
    held = [one for one in ended.document["trials"] if one["state"] in ("running", "waiting")]
    assert not held, "the command ended while a worker of another one had them"
    complete = [one for one in ended.document["trials"] if one["state"] == "complete"]
    assert max(collections.Counter(one["number"] for one in complete).values()) == 1
    return {one["number"]: (one["values"], one["value"]) for one in complete}


def attempts(ended, number):
    found = [one for one in ended.document["trials"] if one["number"] == number]
    assert len({str(one["values"]) for one in found}) == 1
    return [one["state"] for one in found]


@campaign
def test_trials_over_three_nodes_are_those_of_one_worker_here(search, away, tmp_path):
    ended, heard = away("meets_two_others", hpo__n_trials=200)
    assert ended.status == "finished"
    assert {one.worker for one in heard if isinstance(one, TrialEnded)} == {1, 2, 3}
    assert all(len(path.read_text().splitlines()) == 1 for path in (tmp_path / "study/trials").glob("*/ran.jsonl"))
    one, _ = search("quadratic", hpo__n_trials=200, hpo__folder=tmp_path / "one")
    assert values(ended) == values(one)
    assert len(values(ended)) == 200


@campaign
@pytest.mark.parametrize(
    ("objective", "cause"),
    [
        ("kills_its_worker_once", "its process on the cluster died (signal 9)"),
        pytest.param(
            "kills_its_ray_worker_once", "its process or its node on the cluster was lost", marks=pytest.mark.long
        ),
        ("kills_its_node_once", "its process or its node on the cluster was lost"),
    ],
)
@pytest.mark.some_of(2)
def test_a_trial_that_is_lost_is_run_again_with_its_values_and_once(search, away, tmp_path, objective, cause):
    ended, _ = away(objective, hpo__n_trials=12)
    assert ended.status == "finished"
    assert attempts(ended, 1) == ["died", "complete"]
    assert [one["cause"] for one in ended.document["trials"] if one["state"] == "died"] == [cause]
    one, _ = search("quadratic", hpo__n_trials=12, hpo__folder=tmp_path / "one")
    assert values(ended) == values(one)


@campaign
@pytest.mark.long
def test_trials_need_no_shared_folder_where_runs_are_stored(search, away, tmp_path):
    ended, _ = away("kills_its_node_once", hpo__n_trials=12, run__storage=f"file://{tmp_path}/there")
    assert attempts(ended, 1) == ["died", "complete"]
    one, _ = search("quadratic", hpo__n_trials=12, hpo__folder=tmp_path / "one")
    assert values(ended) == values(one)
    folders = [tmp_path / "study/trials" / name for name in ("0000", "0001-2", "0011")]
    assert all((folder / "outcome.json").is_file() for folder in folders)
    assert not any((folder / "ran.jsonl").exists() for folder in folders)  # they ran in folders of their nodes' own
    assert list(tmp_path.glob("there/study/*/study.json"))


def test_a_stored_outcome_of_a_trial_whose_command_was_killed_is_read(compose, tmp_path):
    from hotloop.train import mirror
    from hotloop.train.search.study import Outcome, Study, write_outcome

    study = Study(compose(hpo__engine="ray", run__storage=f"{tmp_path}/there"), tmp_path / "study", print)
    taken = study.take()
    node = tmp_path / "node/study/trials/0000"
    write_outcome(node, Outcome("complete", 7.0))
    mirror.Mirror(f"{tmp_path}/there/study/trials/0000", node).push(("outcome.json",))
    assert study._outcome(taken.folder) == Outcome("complete", 7.0, also=[])
    study.storage.close()


@campaign
@pytest.mark.long
def test_every_kind_of_end_comes_back(away):
    ended, _ = away("every_third_fails", hpo__n_trials=6, hpo__pruner="none")
    found = {one["number"]: (one["state"], one["cause"]) for one in ended.document["trials"]}
    assert found[0] == ("failed", "RuntimeError: planted in trial 0")
    assert found[1] == ("failed", "the objective f1 is nan")
    assert found[2][0] == "complete"


@campaign
def test_trials_on_a_cluster_are_pruned_by_what_they_report(away):
    ended, _ = away("quadratic", hpo__n_trials=30, hpo__pruner="median", hpo__startup_trials=3, hpo__workers=2)
    states = collections.Counter(one["state"] for one in ended.document["trials"])
    assert states["pruned"] > 3
    assert states["pruned"] + states["complete"] == 30


def command(tmp_path, address, objective="waits_for_a_kill", **more):
    program = (
        "import sys; from hotloop.train import configure; from hotloop.train.search import supervise\n"
        f"e = supervise.search(configure.load(sys.argv[1:]), print, 'search_objectives:{objective}')\n"
        "sys.exit(130 * (e.status == 'interrupted'))"
    )
    chosen = {
        "hpo.folder": tmp_path / "study", "hpo.sampler": "random", "hpo.pruner": "none", "hpo.n_trials": 12,
        "hpo.engine": "ray", "hpo.workers": 3, "engine.address": address,
        **{name.replace("__", "."): value for name, value in more.items()},
    }  # fmt: skip
    return [sys.executable, "-c", program, *(f"{name}={value}" for name, value in chosen.items())]


@campaign
@pytest.mark.parametrize(
    "killed",
    ["everything", *(pytest.param(one, marks=pytest.mark.long) for one in ("the first process", "interrupted"))],
)
def test_a_dead_driver_loses_nothing_and_the_same_command_goes_on(search, away, three, tmp_path, killed):
    process = subprocess.Popen(command(tmp_path, three.address), stdout=subprocess.DEVNULL)
    trials = tmp_path / "study" / "trials"
    once(lambda: all((trials / f"{number:04d}" / "began").exists() for number in (2, 3, 4)))
    workers = children(process.pid)
    process.send_signal(signal.SIGINT if killed == "interrupted" else signal.SIGKILL)
    for worker in workers if killed == "everything" else ():
        os.kill(worker, signal.SIGKILL)
    code = process.wait(300)
    assert code == (130 if killed == "interrupted" else -signal.SIGKILL)
    once(lambda: all(is_gone(worker) for worker in workers))
    (tmp_path / "study" / "go").touch()
    ended, _ = away("waits_for_a_kill", hpo__n_trials=12, hpo__workers=3)
    assert ended.status == "finished"
    assert attempts(ended, 2)[-1] == "complete"
    one, _ = search("quadratic", hpo__n_trials=12, hpo__folder=tmp_path / "one")
    assert values(ended) == values(one)
    assert document.refresh(tmp_path / "study")[0]["left"] == 0


@campaign
@pytest.mark.long
def test_two_hundred_trials_outlive_a_process_a_worker_a_node_the_storage_and_the_command(
    search, away, three, tmp_path, postgresql
):
    more = {"hpo__n_trials": 200, "hpo__storage": f"'{postgresql.url}'", "hpo__name": tmp_path.name}
    process = subprocess.Popen(
        command(tmp_path, three.address, "loses_much", **more), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    trials = tmp_path / "study" / "trials"

    def ran(many):
        assert process.poll() is None
        return sum(1 for _ in trials.glob("*/outcome.json")) >= many

    once(lambda: ran(80), 300)
    postgresql.stop()
    time.sleep(3)
    postgresql.start()
    once(lambda: ran(120), 300)
    process.kill()
    process.wait(60)
    ended, _ = away("loses_much", **more)
    assert ended.status == "finished"
    one, _ = search("quadratic", hpo__n_trials=200, hpo__folder=tmp_path / "one", hpo__name=tmp_path.name)
    assert values(ended) == values(one)
    assert sorted(values(ended)) == list(range(200))
    assert {attempts(ended, number)[0] for number in (20, 40, 60)} == {"died"}


@campaign
@pytest.mark.long
def test_a_cluster_is_reached_from_outside_by_rays_client(search, tmp_path):
    port = free_port()
    with nodes(1, 1, client=port):
        ended, _ = search(
            "kills_its_ray_worker_once", hpo__engine="ray", hpo__workers=2, engine__address=f"ray://127.0.0.1:{port}",
            hpo__n_trials=12,
        )  # fmt: skip
    assert attempts(ended, 1) == ["died", "complete"]
    one, _ = search("quadratic", hpo__n_trials=12, hpo__folder=tmp_path / "one")
    assert values(ended) == values(one)


@campaign
def test_a_cluster_of_another_version_is_told(compose, three, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "__version__", "2.1.0")
    with pytest.raises(
        ConfigError, match=r"(?s)ersion mismatch.*2\.1\.0.*Install the cluster's versions of Ray and Python"
    ):
        supervise.search(compose(hpo__engine="ray", engine__address=three.address), print)
