"""Trials on a Ray cluster of several nodes: none is lost when a worker is."""

import pytest

pytest.importorskip("ray")
from ray_cluster import nodes

from hotloop.errors import ConfigError
from hotloop.train.cluster import Cluster


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1"])
def test_an_address_that_nobody_answers_is_refused_and_nothing_is_written(compose, tmp_path, address):
    from hotloop.train.search import command

    with pytest.raises(ConfigError, match=rf"engine\.address={address}: .*Start Ray there"):
        command.search(compose(hpo__engine="ray", engine__address=address), print)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("nodes", "more", "room", "gpus"),
    [
        (({"CPU": 2.0}, {"CPU": 3.0}), {}, 5, 0),
        (({"CPU": 2.0}, {"CPU": 3.0}), {"engine__num_cpus": 2}, 2, 0),
        (({"CPU": 8.0, "GPU": 4.0},), {}, 4, 1),
        (({"CPU": 8.0, "GPU": 4.0},), {"engine__num_gpus": 0.5}, 8, 0.5),
        (({"CPU": 8.0, "GPU": 4.0},), {"run__device": "cpu"}, 8, 0),
    ],
)
def test_a_cluster_has_room_for_as_many_workers_as_fit(compose, nodes, more, room, gpus):
    found = Cluster(None, compose(**more), nodes)
    assert (found.room, found.needs["num_gpus"]) == (room, gpus)


@pytest.mark.campaign
def test_trials_over_several_nodes_are_all_there_and_a_dead_worker_loses_none(search):
    with nodes(1, 1) as made:
        given = {"hpo__engine": "ray", "engine__address": made.address, "hpo__workers": "auto", "hpo__n_trials": 8}
        ended, lines = search("kills_its_worker_once", **given)
    assert ended.status == "finished"
    complete = [one for one in ended.document["trials"] if one["state"] == "complete"]
    assert 8 <= len(complete) <= 9
    assert any("died" in line for line in lines)
