"""The benchmark of frameworks: its plan, and the arithmetic of its tables."""

import contextlib
import json
import pathlib
import types

import pytest
import torch

from benchmarks.frameworks import __main__ as command
from benchmarks.frameworks import child, plan, show

COLD = {"way": "theirs", "cold_seconds": 10.0, "cold_steps": 3, "compiles": 1, "recompiles": 0, "leaked_keys": 2}
JOBS = {
    "fabric:cold:eager": {**COLD, "cold_seconds": 0.3, "leaked_keys": 0},
    "fabric:cold:theirs": COLD,
    "fabric:cold:ours:default": {**COLD, "cold_seconds": 4.0, "leaked_keys": 0},
    "fabric:cold:ours:auto": {"way": "ours:auto", "real": {"200": 3.0, "1000": 6.0}},
    "fabric:steady:eager+theirs+ours:default": {
        "ways": {
            "eager": {"ms": 10.0, "ms_low": 9.0, "ms_high": 11.0},
            "theirs": {
                "ms": 8.0,
                "ms_low": 7.0,
                "ms_high": 9.0,
                "over_eager": {"ratio": 1.25, "low": 1.2, "high": 1.3},
            },
            "ours:default": {"ms": 5.0, "ms_low": 4.0, "ms_high": 6.0},
        }
    },
    "fabric:failure:theirs:backward run": {"way": "theirs", "outcome": "ended: PlantedError"},
    "fabric:failure:ours:aot_eager:backward run": {"outcome": "trained on", "off_by": 0.0},
}


@pytest.mark.parametrize("size", ["gpu", "cpu"])
def test_each_job_has_a_name_of_its_own_and_each_row_all_its_ways(size):
    jobs = plan.jobs(size)
    assert len({job.key for job in jobs}) == len(jobs)
    for row in plan.ROWS:
        cold = {job.ways[0] for job in jobs if job.row == row.name and job.kind == "cold"}
        assert cold == (set() if row.big and size == "cpu" else {"eager", "theirs", *row.ours(size)})
    assert {job.key for job in plan.choose(jobs, ["fabric:cold"])} < {job.key for job in jobs if job.row == "fabric"}


def test_totals_are_cold_seconds_and_the_steps_left_and_auto_was_run():
    assert show.total(JOBS, "fabric", "theirs", 1_000) == pytest.approx(10 + 997 * 0.008)
    assert show.total(JOBS, "fabric", "ours:auto", 1_000) == 6.0
    assert show.total(JOBS, "fabric", "ours:auto", 10_000) is None
    found = show.totals(JOBS)
    (gain,) = (value for key, value in found.items() if key.startswith("geometric"))
    assert gain == pytest.approx((10 + 997 * 0.008) / 6.0)


def test_the_tables_show_what_was_measured():
    peak = {"memory": {"allocated_mb": 9_993}, "memory_in_force": {"allocated_mb": 4_300}}
    cold = {**JOBS["fabric:cold:ours:default"], **peak}
    text = show.tables({"jobs": {**JOBS, "fabric:cold:ours:default": cold}})
    assert "| 9,993 (4,300 in force) | 0 | 0 |" in text
    assert "| theirs | 8 (7-9) | 1.25 (1.2-1.3) |" in text
    assert "| backward run | theirs | ended: PlantedError |" in text
    assert "| backward run | ours:aot_eager | trained on, parameters off by 0.0e+00 |" in text


def test_the_row_of_lightnings_guide_prints_its_three_lines():
    jobs = {key.replace("fabric", "lightning-inception"): one for key, one in JOBS.items()}
    text = show.tables({"jobs": jobs})
    lines = "Eager median time: 0.0100 seconds\nCompile median time: 0.0050 seconds\nSpeedup: 2.0x\n"
    assert f"ours:default:\n\n```\n{lines}```" in text
    assert text.count("Speedup: ") == 2
    assert "Speedup" not in show.tables({"jobs": JOBS})


def test_jobs_that_the_file_holds_are_not_run_again(tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.json"
    ran = []
    monkeypatch.setattr(command, "measured", lambda job, size, limit, caches: ran.append(job.key) or dict(COLD))
    monkeypatch.setattr(plan, "missing", lambda row: "")
    arguments = ["--cpu", "--only", "fabric:cold", "--out", str(out)]
    assert command.main(arguments) == 0
    assert ran == ["fabric:cold:eager", "fabric:cold:theirs", "fabric:cold:ours:default"]
    assert command.main(arguments) == 0
    assert len(ran) == 3
    assert set(json.loads(out.read_text())["jobs"]) == set(ran)
    assert command.main(["--cpu", "--only", "nonesuch", "--out", str(out)]) == 2
    assert "no job is called so" in capsys.readouterr().err


def test_a_steady_job_finds_what_the_cold_ones_of_its_row_have_compiled(monkeypatch, tmp_path):
    seen = {}

    def ended(command, env, limit):
        job = json.loads(command[-1])
        place = pathlib.Path(env["TORCHINDUCTOR_CACHE_DIR"])
        seen[job["job"]["row"], job["job"]["kind"]] = sorted(one.name for one in place.glob("*"))
        place.mkdir(exist_ok=True)
        (place / job["job"]["ways"][0]).write_text("code")
        pathlib.Path(job["out"]).write_text("{}")

    monkeypatch.setattr(command, "ended", ended)
    for job in (
        plan.Job("cold", "fabric", ("eager",)),
        plan.Job("cold", "fabric", ("theirs",)),
        plan.Job("steady", "lightning", ("eager",)),
        plan.Job("steady", "fabric", ("eager", "theirs")),
    ):
        command.measured(job, "cpu", 9.0, tmp_path)
    assert seen == {("fabric", "cold"): [], ("lightning", "steady"): [], ("fabric", "steady"): ["eager", "theirs"]}


IN_PLACE = " component ┃ asked for ┃ running ┃ state    ┃\n model     │ default   │ {} │ {} │ 0 │"


@pytest.mark.parametrize(
    ("compiled", "status", "eager"),
    [
        (False, None, True),
        (True, None, False),
        (False, "hotloop: full+graph at step 54\n full+graph │ in force │\n eager │ timed │", False),
        (False, "hotloop: eager at step 54 (asked for: full)\n full │ declined │", True),
        (False, IN_PLACE.format("default", "compiled"), False),
        (False, IN_PLACE.format("none   ", "eager   "), True),
    ],
)
def test_a_way_whose_code_another_has_compiled_did_not_run_eager(compiled, status, eager):
    assert show.ran_eager(compiled, status) is eager
    (name,) = [key for key in JOBS if ":steady:" in key]
    told = {"compiled": {"ours:default": compiled}, "status": {"ours:default": status}}
    text = show.tables({"jobs": {**JOBS, name: {**JOBS[name], **told}}})
    assert ("| ours:default (ran eager) |" in text) is eager


def test_an_injected_failure_is_told_beside_two_eager_runs(monkeypatch):
    first, failed, second = (torch.tensor([value]) for value in (1.0, 1.5, 1.25))
    left = iter([[first], [failed], [second]])
    monkeypatch.setattr(child, "_loss_of", lambda row, way, run: next(left))
    planted = types.SimpleNamespace(fired=1, compile=None)
    monkeypatch.setattr(child, "planted_failure", lambda stage, after: contextlib.nullcontext(planted))
    order = {"row": "fabric", "ways": ["ours:aot_eager"], "stage": "backward run"}
    found = child.failure(order, child.Run("cpu"))
    assert (found["off_by"], found["eager_off_by"]) == (0.5, 0.25)
    text = show.tables({"jobs": {**JOBS, "fabric:failure:ours:aot_eager:backward run": found}})
    assert "trained on, parameters off by 5.0e-01 (two eager runs by 2.5e-01) |" in text


def test_the_page_has_the_table_of_its_file(capsys):
    root = pathlib.Path(__file__).parents[2]
    assert command.main(["--together", str(root / "benchmarks/results/2026-11-22-h200-frameworks.json")]) == 0
    table = capsys.readouterr().out.strip()
    assert len(table.splitlines()) == 2 + 7 * 5
    assert "(ran eager)" not in table
    assert table in (root / "docs/evidence/frameworks.md").read_text()
