"""Each rule on a real program: through the compile, the events and the status to the advice, with line and remedy."""

from __future__ import annotations

import pytest
from diagnose_documents import PROGRAMS, document_of, line_of
from test_diagnose_rules import ALSO, NAMES, entry_names

from hotloop.diagnose import diagnose

REAL = sorted(path.stem for path in PROGRAMS.glob("*.py") if not path.stem.startswith("clean-"))
INDUCTOR = {"cold_cache"}


@pytest.mark.filterwarnings("ignore")  # programs as users write them: their warnings are theirs
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.inductor] if name in INDUCTOR else []) for name in REAL]
)
def test_a_program_gives_its_advice(name):
    if name == "graph_break-self_log":
        pytest.importorskip("lightning")
    program = PROGRAMS / f"{name}.py"
    found = diagnose(document_of(program))
    assert entry_names(found) == {name} | ALSO.get(name, set())
    (advice,) = [one for one in found if entry_names([one]) == {name}]
    if (line := line_of(program)) is not None:
        assert (advice.file, advice.line) == (str(program), line)
    told, entry = str(advice), NAMES[name]
    assert advice.change in told
    assert advice.remedy == (None if name == "recompile_limit" else entry.remedy)
    if entry.remedy is not None and name != "recompile_limit":
        assert "hotloop.Loop" in told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["clean-train", "clean-loop"])
def test_a_clean_program_gives_none(name):
    document = document_of(PROGRAMS / f"{name}.py")
    assert document["events"]
    assert diagnose(document) == []
