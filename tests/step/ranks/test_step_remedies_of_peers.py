"""Remedies of several processes are followed: each step is declined as it is written, and captured as the line says."""

import pytest
import rank_processes

pytestmark = pytest.mark.campaign  # several processes

REMEDIES = {
    "lengths": "pad batches to a few sizes",
    "rank": "leave what differs between processes (a rank, a path) out of the arguments of the step",
    "unused": "leave it out where every parameter is used",
    "hooked": "a communication hook (_mean) is not recorded",
    "teacher": "give it to the loop: Loop([model, other], optimizer)",
    "reads": "return",
    "spread result": "this process's part, tensor.to_local()",
    "spread argument": "pass this process's part, tensor.to_local()",
    "unset": "set it back at the end of the step",
}


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    return rank_processes.told_by("remedies_program.py", tmp_path_factory.mktemp("remedies"), *REMEDIES)


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_of_several_processes_works_when_it_is_followed(followed, name):
    for written, mended in [told[name] for told in followed]:
        assert written["same"]
        assert mended["same"]
        assert written["last"][0] == "eager"
        assert mended["last"] == ["eager+graph", "run"], mended["status"]
    assert any(REMEDIES[name] in told[name][0]["status"] for told in followed), followed[0][name][0]["status"]
