"""The commands of the guides are there, and answer."""

import json
import subprocess
import sys

import pytest
import torch
from guide_programs import Classifier, batches, command
from torch.nn import functional as F

import hotloop

SETTINGS = {
    "none": {},
    "default": {},
    "inductor": {"max_autotune": True, "epilogue_fusion": True, "triton.cudagraphs": False},
    "triton": {"max_autotune": True, "epilogue_fusion": True, "triton.cudagraphs": True, "shape_padding": True},
    "aot_eager": {},
}


def test_the_module_alone_prints_help_with_the_commands():
    done = subprocess.run([sys.executable, "-m", "hotloop.cli"], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert "Usage: hotloop" in said
    for name in ("train", "hpo", "kfold", "harness", "presets", "cache", "report", "settings", "runs"):
        assert f" {name} " in said, name


def test_presets_lists_the_guides_modes_with_their_settings_and_what_to_try(capsys):
    assert command("presets", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    found = {one["name"]: one for one in told["presets"]}
    for name, options in SETTINGS.items():
        assert found[name]["options"] == options, name
        assert all(found[name][column] for column in ("performance", "overhead", "memory", "best_for")), name
    backends = {name: found[name]["backend"] for name in SETTINGS}
    assert backends == {
        "none": "eager", "default": "inductor", "inductor": "inductor", "triton": "inductor", "aot_eager": "aot_eager",
    }  # fmt: skip
    assert found["triton"]["ladder"][0] == "inductor", "what fails under triton is tried under inductor"
    assert found["inductor"]["ladder"][-1] == found["default"]["ladder"][-1] == "none"
    steps = " ".join(told["troubleshooting"]).lower()
    assert "triton -> inductor -> default" in steps
    assert "fewer components" in steps
    assert "aot_eager" in steps
    assert command("presets") == 0
    table = capsys.readouterr().out
    assert all(name in table for name in SETTINGS)


def test_settings_lists_what_a_recipe_reads(capsys):
    assert command("settings", "recipe=criteria") == 0
    listed = capsys.readouterr().out
    assert "use_torch_compile" in listed
    assert "learning_rate" in listed


def test_cache_says_what_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path / "cache"))
    assert command("cache", "--help") == 0
    assert "Usage: hotloop cache" in capsys.readouterr().out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder below which a loop has recorded a run of four steps."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hotloop.Loop(model, optimizer, record=folder) as loop:

        @loop.step
        def train_step(ids, labels):
            loss = F.cross_entropy(model(ids), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for batch in batches(4):
            train_step(*batch)
    return folder


def test_report_tells_a_recorded_run_and_writes_its_page(recorded, capsys):
    assert command("report", recorded) == 0
    assert capsys.readouterr().out.strip()
    assert "<html" in (recorded / "report.html").read_text(encoding="utf-8")


def test_runs_lists_and_shows_a_recorded_run(recorded, capsys):
    assert command("runs", "list", recorded.parent) == 0
    assert "mine" in capsys.readouterr().out
    assert command("runs", "show", recorded) == 0
    assert capsys.readouterr().out.strip()
