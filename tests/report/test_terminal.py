import io

import pytest
from report_documents import FILE, fresh
from rich.console import Console

from hotloop import record
from hotloop.cli.report import report
from hotloop.report import build
from hotloop.report.terminal import EVENTS, draw


def shown(document, width=120):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False, highlight=False).print(draw(build(document)))
    return out.getvalue()


def test_the_summary_says_what_ran_and_why(document):
    text = shown(document)
    for said in (
        "criteria  finished",
        "Finished: 200 steps in 1 min 30 s.",
        "model  partial  was asked for triton and ran partly compiled, the rest on inductor",
        "because: [run] capture failed",
        f"at: {FILE}:71",
        "line: x = y.cpu()",
        "try: log after the step",
        "3 compiles · 200 compiled runs · 4 eager runs · 1 recompile · 15 s compiling",
        "loss  eager  ran eager, as asked",
        "Peak memory",
        "3 GiB",
        "validation f1",
        "pays from step 40 on",
        "within the error ratio",
        "Fallback",
    ):
        assert said in text
    assert text.index("Fallback") < text.index("Recompiled") < text.index("Compiled")


def test_what_runs_as_it_was_written_is_not_said_to_have_run_so_0_times():
    counts = {"compiles": 0, "frames_compiled": 0, "frames_eager": 0}
    eager = {"requested": "none", "running": "none", "state": "eager", **counts}
    assert "ran eager, as asked" in shown(fresh(components={"gist": eager}))
    assert "0 eager runs" not in shown(fresh(components={"gist": eager}))
    assert "0 eager runs" in shown(fresh(components={"gist": {**eager, "state": "compiled"}}))


def test_a_decision_has_its_reason_and_its_first_figures():
    decision = {
        "step": 8,
        "action": "stay",
        "tier": "eager",
        "reason": "[b]eager[/] stays",
        "steps_left": 28,
        "chance": 0.5,
    }
    said = " ".join(shown(fresh(decisions=[decision])).split())
    assert said.endswith("stay 8 [b]eager[/] stays")


def test_an_empty_run_is_three_lines(empty):
    lines = shown(empty).splitlines()
    assert len(lines) == 2 + 1
    assert lines[0].startswith("Training run  finished")


@pytest.mark.parametrize("width", [20, 40, 200])
def test_hostile_text_is_neither_markup_nor_escapes(hostile, width):
    hostile["settings"]["recipe"] = "[bold red]name[/] [link=x]"
    text = shown(hostile, width)
    assert "\x1b" not in text
    assert "[bold" in text
    text.encode()
    assert all(len(line) <= width for line in text.splitlines())


def test_what_is_left_out_is_counted():
    events = [{"kind": "recompiled", "reason": f"guard {n}", "step": n} for n in range(EVENTS + 7)]
    assert "and 7 more" in shown(fresh(events=events))


def test_a_run_of_several_processes_has_a_table_of_all(tmp_path, capsys):
    for folder, running in ((tmp_path, "eager+graph"), (tmp_path / "rank-1", "eager")):
        with record.RunRecord(folder) as run:
            run.update("components", model={"running": running})
            run.update("measurements", steady_step_ms=2.5, steps_done=40)
            if running == "eager":
                run.append("events", {"kind": "tier_declined", "tier": "eager+graph", "reason": "a value is read"})
    (tmp_path / "rank-2").mkdir()  # its process has not begun
    report(tmp_path, html=None, as_json=False)
    shown, page = capsys.readouterr().out, (tmp_path / "report.html").read_text(encoding="utf-8")
    first = "eager+graph; 2.5 ms a step; 40 steps; finished"
    second = "eager; 2.5 ms a step; 40 steps; finished; eager+graph declined: a value is read"
    for text in (shown, page):
        assert first in text
        assert second in text
    report(tmp_path / "rank-1", html=None, as_json=False)
    assert "Processes" not in capsys.readouterr().out
