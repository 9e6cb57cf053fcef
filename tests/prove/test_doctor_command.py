"""``hotloop doctor`` as it is typed: exit codes, JSON, the page, records without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hotloop.cli
from hotloop.diagnose import RULES
from hotloop.events import GraphBreak
from hotloop.prove.doctor import gathering
from hotloop.prove.doctor.gathering import Machine
from hotloop.record import RunRecord

HOSTILE = "<script>alert(1)</script>\x1b[31m"


def doctor(*args):
    with pytest.raises(SystemExit) as stopped:
        hotloop.cli.main(["doctor", *map(str, args)])
    return stopped.value.code or 0


@pytest.fixture
def broken():
    return GraphBreak(
        component="model",
        file="train.py",
        line=41,
        source="if loss.item() > 3:",
        reason="Unsupported Tensor.item() call",
        hint="keep it a tensor",
    )


@pytest.fixture
def folder(tmp_path, broken):
    with RunRecord(tmp_path / "a run") as run:
        run.update("settings", name="mine", preset="default", run="default")
        run.update("measurements", ways={"eager": {"step_ms": 10.0}, "default": {"step_ms": 8.0, "cold_seconds": 20.0}})
        run.append("events", {**broken.to_dict(), "step": 1})
    return tmp_path / "a run"


@pytest.fixture
def machine(monkeypatch):
    """A machine without a compiler, so that nothing has to be gathered."""
    found = Machine(hotloop="0.1.0", torch="2.13.0")
    monkeypatch.setattr(gathering, "gather", lambda trials: found)
    return found


@pytest.mark.parametrize("name", ["", "record.json", "record.jsonl"])
def test_a_run_on_record_is_diagnosed(folder, name, capsys):
    assert doctor(folder / name) == 0
    out = capsys.readouterr().out
    assert out.startswith("default: 1.25x eager.")
    for said in ("Graph break", "train.py:41: if loss.item() > 3:", "8 ms", "20 s"):
        assert said in out


def test_a_record_needs_no_torch(folder):
    program = (
        f"import sys; sys.argv = ['hotloop', 'doctor', {str(folder)!r}]\n"
        "from hotloop.cli import main\n"
        "try: main()\nexcept SystemExit as done: print('torch' in sys.modules, done.code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False 0"


@pytest.mark.parametrize("args", [["--help"], ["--fail-on", "nonesuch"], ["--quick", "--fail-on", "nonesuch"]])
def test_help_and_wrong_usage_need_no_torch(args):
    program = (
        f"import sys; sys.argv = ['hotloop', 'doctor', *{args!r}]\n"
        "from hotloop.cli import main\n"
        "try: main()\nexcept SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_json_has_the_advice_and_the_figures(folder, capsys):
    assert doctor(folder, "--json", "--total-steps", "100") == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"verdict", "settings", "environment", "measurements", "components", "advice", "html"}
    assert data["settings"]["total_steps"] == 100
    assert data["measurements"]["ways"]["default"]["step_ms"] == 8.0
    advice = next(one for one in data["advice"] if one["rule"] == "graph_break")
    assert {"rule", "what", "cause", "change", "file", "line", "source", "milliseconds", "seconds", "compiles", "nbytes",
            "times", "component", "remedy"} <= set(advice)  # fmt: skip


def test_the_page_is_written_and_harmless(tmp_path, capsys):
    hostile = GraphBreak(component=HOSTILE, file=HOSTILE, line=1, source=HOSTILE, reason=HOSTILE, hint=HOSTILE)
    with RunRecord(tmp_path / "run") as run:
        run.update("settings", name=HOSTILE)
        run.append("events", hostile.to_dict())
    page = tmp_path / "pages" / "a.html"
    assert doctor(tmp_path / "run", "--html", page) == 0
    out = capsys.readouterr().out
    assert f"Report: {page}" in out
    assert "\x1b" not in out
    text = page.read_text(encoding="utf-8")
    assert 'id="advice"' in text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.parametrize(
    ("names", "code"),
    [("graph_break", 1), ("Graph_Break, host_sync", 1), ("any", 1), ("host_sync", 0), (None, 0)],
)
def test_fail_on_decides_the_exit_code(folder, names, code, capsys):
    assert doctor(folder, *(["--fail-on", names] if names else [])) == code
    assert ("found graph_break" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize("names", ["graph_brake", "", "graph_break,nonesuch"])
def test_a_rule_that_does_not_exist_lists_those_that_do(folder, names, capsys):
    assert doctor(folder, "--fail-on", names) == 2
    err = capsys.readouterr().err
    assert "does not exist" in err
    assert "graph_break" in err
    assert all(rule in err for rule in RULES)


@pytest.mark.parametrize("target", ["nonesuch", "train.py", "nonesuch.py:make", "no.such.module:make"])
def test_a_target_that_is_nothing_is_2(target, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    assert doctor(target) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("hotloop: ")
    assert len(err) <= 2


def test_a_workload_from_end_to_end(program, tmp_path, capsys, line_of):
    page = tmp_path / "a.html"
    args = ("--preset", "aot_eager", "--steps", "4", "--json", "--html", page, "--fail-on", "graph_break")
    assert doctor(program("breaks"), *args) == 1
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["html"] == str(page)
    assert "eager steps" in captured.err
    text = page.read_text(encoding="utf-8")
    assert f":{line_of('BREAK')}" in text
    assert "if hidden.sum().item() &gt; 1e9:" in text


def test_what_a_program_prints_does_not_spoil_the_json(program, capsys):
    assert doctor(program("reads"), "--preset", "none", "--steps", "4", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["settings"]["preset"] == "none"
    assert "targets tensor" in captured.err


def test_a_programs_own_exception_is_theirs_and_no_usage_error(program, capsys):
    assert doctor(program("fails_in_the_third"), "--preset", "aot_eager", "--steps", "4") == 3
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert "KeyError: 'their own'" in shown
    assert "hotloop doctor: raised in step 3, which ran eager" in shown


def test_the_machine_in_words_and_as_json(machine, capsys):
    assert doctor() == 0
    out = capsys.readouterr().out
    assert out.startswith("1 problem; first: install g++")
    assert "compiler: no C++ compiler" in out
    assert doctor("--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"findings", "machine"}
    assert set(data["findings"][0]) == {"level", "topic", "what", "remedy"}
    assert data["machine"]["torch"] == "2.13.0"


@pytest.mark.parametrize(("names", "code"), [("problem", 1), ("any", 1), ("warning", 0), ("graph_break", 2)])
def test_fail_on_of_the_machine(machine, names, code):
    assert doctor("--fail-on", names) == code
