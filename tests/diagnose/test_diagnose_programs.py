"""Each rule on a real program: through the compile, the events and the status to the advice, with line and remedy."""

from __future__ import annotations

import pytest
import torch
from diagnose_documents import PROGRAMS, document_of, line_of
from test_diagnose_rules import ALSO, NAMES, problem_names
from torch import nn

import hotloop
from hotloop._torch import versions
from hotloop.diagnose import diagnose
from hotloop.diagnose.breaks import cause_of
from hotloop.diagnose.observed import no_effect

REAL = sorted(path.stem for path in PROGRAMS.glob("*.py") if not path.stem.startswith("clean-"))
INDUCTOR = {"cold_cache"}


@pytest.mark.filterwarnings("ignore")  # programs as users write them: their warnings are theirs
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.inductor] if name in INDUCTOR else []) for name in REAL]
)
def test_a_program_gives_its_advice(name):
    if name in ("graph_break-self_log", "no_effect-method"):
        pytest.importorskip("lightning")
    program = PROGRAMS / f"{name}.py"
    document = document_of(program)
    found = diagnose(document)
    # In self.log torch 2.11 stops in Python's inspect as well, before Lightning's own line: both are advised on.
    earlier = name == "graph_break-self_log" and versions.check() == (2, 11)
    also = {"graph_break-other", "recompile-arguments"} if earlier else ALSO.get(name, set())
    assert problem_names(found) == {name} | also
    hints_are_the_cures(document)
    (advice,) = [one for one in found if problem_names([one]) == {name}]
    if earlier:
        (other,) = [one for one in found if problem_names([one]) == {"graph_break-other"}]
        assert f"called at {program}:{line_of(program)}" in other.what
    elif (line := line_of(program)) is not None:
        # torch tells where a relation of sizes comes from once a process; else it is where the function begins.
        lines = {line, line - 2} if name == "recompile-size_relation" else {line}
        assert advice.file == str(program)
        assert advice.line in lines
    told, problem = str(advice), NAMES[name]
    assert advice.change in told
    assert advice.remedy == (None if name == "recompile_limit" else problem.remedy)
    if problem.remedy is not None and name != "recompile_limit":
        assert "hotloop.Loop" in told


def hints_are_the_cures(document):
    """The log and the status, which give the events' hints, say the same as the advice."""
    for event in document["events"]:
        if event["kind"] == "no_effect" and event["problem"] != "container":
            assert event["hint"] == no_effect(event["problem"]).change
        if event["kind"] in ("graph_break", "frame_eager"):
            known = cause_of(event["reason"], event["source"])
            assert event["hint"] == known.change or known.kind == "other", event


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["clean-train", "clean-loop"])
def test_a_clean_program_gives_none(name):
    document = document_of(PROGRAMS / f"{name}.py")
    assert document["events"]
    assert diagnose(document) == []


def test_a_program_that_knows_nothing_of_hotloop():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.count = nn.Linear(4, 4), 1

        def forward(self, x):
            return self.linear(x) * self.count

    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    with hotloop.watch() as events:
        for model.count in (1, 2, 3):
            compiled(torch.ones(2, 4)).sum().backward()
    (advice,) = diagnose({"events": [event.to_dict() for event in events]})
    assert (advice.rule, advice.kind, advice.component) == ("recompile", "attribute", None)
    assert advice.compiles == 2
    assert advice.source == "return self.linear(x) * self.count"
    assert "self.count changed (it was 1, 2)" in advice.what
