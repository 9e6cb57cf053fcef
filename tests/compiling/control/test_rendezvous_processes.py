"""Two processes that compile in place, without a loop: nobody's collectives time out for a compile of another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared import free_port

from hotloop.compiling.control.rendezvous import judge

pytestmark = pytest.mark.campaign  # several processes, some of which are stopped

PROGRAM = Path(__file__).with_name("rendezvous_program.py")


def two_processes(folder, *scenarios, ends=(0, 0)):
    """Run scenarios in two processes; gives what each tells, and what it wrote beside that."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PORT": str(free_port())}
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(rank), *scenarios],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        done = [one.communicate(timeout=900) for one in running]
    finally:
        for one in running:
            one.kill()
    assert tuple(one.returncode for one in running) == ends, "\n".join(error for _, error in done)
    return [json.loads(out.strip().splitlines()[-1]) if out.strip() else None for out, _ in done], [e for _, e in done]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two processes tell of all that they live through: to start them takes longer than to train."""
    scenarios = "alone", "sleep", "late", "short", "fullgraph", "breaks", "fsdp2", "regrouped"
    return two_processes(tmp_path_factory.mktemp("in_place"), *scenarios)


@pytest.mark.parametrize(("name", "compiles"), [("sleep", 1), ("late", 1)])
@pytest.mark.long
def test_a_process_that_compiles_for_longer_than_a_collective_may_take_is_waited_for(trained, name, compiles):
    """A timeout of 4 s, and a backend that sleeps for longer in one process; afterwards the timeout is the user's."""
    for told in trained[0]:
        assert told[name]["same"], told[name]
        assert told[name]["state"] == "compiled", told[name]
        assert told[name]["calls"] == [[compiles, 0]] * 8, told[name]
        assert told[name]["timeout"] == 4.0


@pytest.mark.parametrize(("name", "graphs"), [("short", 1), ("fullgraph", 1), ("breaks", 2), ("fsdp2", 1)])
@pytest.mark.long
def test_a_short_batch_of_one_process_runs_eager_while_the_other_waits_and_is_compiled_later(trained, name, graphs):
    first, second = (told[name] for told in trained[0])
    for told in (first, second):
        assert told["same"], told
        assert told["timeout"] == 4.0
    assert first["calls"] == [[graphs, 0]] * 8
    assert second["calls"][:3] == [[graphs, 0]] * 3
    assert second["calls"][3:5] == [[graphs, 1]] * 2, second  # rank 0 was in a collective of that step
    assert second["calls"][5:] == [[2 * graphs, 1]] * 3, second  # by then it waits for a compile
    assert sum("rank 0 has begun more collectives than this process" in cause for cause in second["causes"]) == 1


@pytest.mark.long
def test_a_compile_in_one_process_alone_stays_eager_and_says_why(trained):
    told, _ = trained
    assert [one["alone"]["same"] for one in told] == [True, True]
    alone = told[1]["alone"]
    assert alone["compiles"] == 0
    assert alone["state"] == "eager"
    assert "rank 0 does not answer" in alone["causes"][0]


@pytest.mark.long
def test_processes_that_met_at_a_store_of_one_of_them_end_in_order(tmp_path):
    """The threads that answer end before that store does: torch would abort the process, or tell of it at length."""
    _, said = two_processes(tmp_path, "nobuffers")
    assert not [line for one in said for line in one.splitlines() if "c10d" in line or "terminate called" in line]


@pytest.mark.long
def test_a_process_that_is_lost_while_it_compiles_ends_the_other(tmp_path):
    told, _ = two_processes(tmp_path, "lost", ends=(0, 3))
    assert "Connection closed by peer" in told[0]["lost"]["raised"]
    assert told[0]["lost"]["seconds"] > 4.0  # it waited beyond the user's timeout, and no longer than the other lived


@pytest.mark.long
def test_a_group_that_is_made_after_another_has_patience_of_its_own(trained):
    """The one before was destroyed right after a compile, while the processes still were patient."""
    for told in trained[0]:
        assert told["regrouped"]["same"], told
        assert told["regrouped"]["state"] == "compiled", told
        assert told["regrouped"]["timeout"] == 4.0


@pytest.mark.parametrize(
    ("answers", "rank", "why", "hopeless"),
    [
        ({0: {"g": (4, 4)}, 1: {"g": (4, 4)}}, 1, "", False),
        ({0: {"g": (4, 9)}, 1: {"g": (4, 4)}}, 1, "", False),  # what began since is patient
        ({0: {"g": (5, 5)}, 1: {"g": (4, 4)}}, 1, "rank 0 has begun more collectives than this process", True),
        ({0: {"g": (5, 5)}, 1: {"g": (4, 4)}}, 0, "rank 1 has begun fewer", False),
        # A group of others: one of them waits for the other, who may wait for us.
        (
            {0: {"g": (4, 4)}, 1: {"g": (4, 4), "h": (3, 3)}, 2: {"g": (4, 4), "h": (2, 2)}},
            0,
            "rank 2 has begun fewer",
            False,
        ),
        ({0: {"g": (4, 4)}, 1: {"h": (3, 3)}}, 0, "", False),  # no group in common
        ({0: {}, 1: {"g": (3, 3)}}, 0, "", False),
    ],
)
def test_a_compile_begins_where_nobody_waits_impatiently(answers, rank, why, hopeless):
    found = judge(answers, rank)
    assert found[0].startswith(why)
    assert bool(found[0]) == bool(why)
    assert found[1] is hopeless
