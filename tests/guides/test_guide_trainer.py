"""The trainer's guide: the command without a recipe, its lines about compiling, searches, folds and the final run."""

import json

import pytest
from guide_programs import AOT, MODE, ON, command, compile_lines, pairs, tiny_encoder

from hotloop.testing import cudagraph_emulation, planted_failure


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Runs go below the test's folder, and nothing of an earlier run is kept."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")
    tiny_encoder()


def train(folder, *settings):
    return command("train", *pairs(folder), f"run.folder={folder / 'run'}", *settings)


@pytest.mark.parametrize("asked", [(), ("training.optimization.use_torch_compile=false",)], ids=["default", "false"])
def test_train_without_a_recipe_trains_the_criteria_recipe_and_false_the_default_is_said(tmp_path, capsys, asked):
    assert train(tmp_path, "training.max_steps=2", *asked) == 0
    said = capsys.readouterr().out
    assert said.startswith("Recipe criteria on ")
    assert compile_lines(said) == ["[torch.compile] Disabled (eager execution mode)"]
    assert (tmp_path / "run" / "checkpoints" / "last.pt").is_file()
    assert "<html" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_true_says_that_the_first_steps_take_longer_and_then_that_the_model_is_compiled(tmp_path, capsys):
    assert train(tmp_path, *AOT, "training.max_steps=4") == 0
    said = compile_lines(capsys.readouterr().out)
    assert said[0].startswith("[torch.compile] Compiling ")
    assert "the first steps then take longer, which is normal" in said[0]
    assert any(line.startswith("[torch.compile] Model compiled with graph optimization") for line in said)


def test_a_compile_that_fails_is_said_with_its_cause_and_the_run_goes_on_in_eager(tmp_path, capsys):
    with planted_failure("forward compile"):
        assert train(tmp_path, *AOT, "training.max_steps=4") == 0
    said = [line for line in compile_lines(capsys.readouterr().out) if "failed" in line]
    assert said
    assert said[0].startswith("[torch.compile] Compilation failed: ")
    assert "planted failure" in said[0]
    assert said[0].endswith("Running in eager mode.")


def test_a_mode_that_does_not_exist_is_answered_with_the_nearest(tmp_path, capsys):
    assert train(tmp_path, ON, f"{MODE}=inducter") == 2
    assert "inductor" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_options_and_presets_of_ones_own_from_the_command_line(tmp_path, capsys):
    assert train(tmp_path, ON, "compile.options.shape_paddin=true") == 2
    assert "shape_padding" in capsys.readouterr().err
    own = "compile.presets.mine={base: aot_eager}"
    assert train(tmp_path, ON, own, f"{MODE}=mine", "compile.measure_eager_steps=1", "training.max_steps=3") == 0
    assert "graph optimization (mine" in capsys.readouterr().out
    dry = ["--dry-run", ON, f"{MODE}=default", "compile.options.shape_padding=true"]
    assert train(tmp_path, *dry, f"run.folder={tmp_path / 'dry'}") == 0


def test_kfold_by_train(tmp_path, capsys):
    assert train(tmp_path, "kfold.n_splits=2", "training.max_steps=2") == 0
    said = capsys.readouterr().out
    assert "2 of 2 folds finished" in said
    assert len(json.loads((tmp_path / "run" / "kfold.json").read_text())["folds"]) == 2


@pytest.mark.campaign
def test_a_search_its_best_settings_and_the_final_run(tmp_path, capsys):
    settings = [*pairs(tmp_path), "training.max_steps=2", f"hpo.folder={tmp_path / 'study'}"]
    assert command("hpo_fast", "--n-trials", "2", *settings) == 0
    said = capsys.readouterr().out
    assert "2 complete" in said
    assert "hotloop train --config" in said, "the command of the final run"
    assert (tmp_path / "study" / "best.yaml").is_file()
    final = [f"run.folder={tmp_path / 'final'}", "training.max_steps=2"]
    assert command("train", "--config", tmp_path / "study" / "best.yaml", *final) == 0
    assert "Recipe criteria on " in capsys.readouterr().out


@pytest.mark.campaign
def test_folds_share_what_the_first_one_compiled(tmp_path, capsys):
    assert train(tmp_path, *AOT, "kfold.n_splits=2", "training.max_steps=3") == 0
    said = capsys.readouterr().out
    assert "Compiled or captured in fold 0: " in said
    assert "Nothing in fold 1" in said


@pytest.mark.campaign
def test_train_runs_the_harness_before_it_switches_cuda_graphs_on(tmp_path, capsys):
    graphs = [ON, f"{MODE}=reduce-overhead", "compile.measure_eager_steps=1", "training.max_steps=3"]
    with cudagraph_emulation():
        assert train(tmp_path, *graphs) == 0
    tried = "reduce-overhead: tried on copies of the model, training and inference, and safe here"
    assert any(tried in line for line in compile_lines(capsys.readouterr().out))


@pytest.mark.campaign
def test_the_switch_of_inference_goes_beside_auto(tmp_path):
    auto = ["training.optimization.use_torch_compile=auto", "compile.inference=aot_eager", "training.max_steps=8"]
    assert train(tmp_path, *auto) == 0
    told = json.loads((tmp_path / "run" / "record.json").read_text())["components"]["model"]
    assert told["modes"]["inference"]["compiles"] >= 1
