import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotloop.cli import app, main
from hotloop.errors import ConfigError

sys.path.append(str(Path(__file__).parents[1] / "train"))
from training_fixtures import overrides


@pytest.fixture
def run():
    def invoke(*arguments):
        result = CliRunner().invoke(app, [str(one) for one in arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def test_a_trained_run_can_be_judged_by_run_and_by_checkpoint(tmp_path, run):
    trained = run("train", *overrides(tmp_path))
    assert trained.exit_code == 0
    for line in (
        "Recipe criteria on",
        "[torch.compile] Disabled (eager execution mode)",
        "Best validation",
        "Report: ",
    ):
        assert line in trained.output
    judged = json.loads(run("eval", f"run={tmp_path / 'run'}", "--json").output)
    assert judged["checkpoint"].endswith("best.pt")
    best = next(line for line in trained.output.splitlines() if "(best so far)" in line)
    assert f"accuracy {judged['metrics']['accuracy']:.4f}" in best
    assert f"auc {judged['metrics']['auc']:.4f}" in best
    table = run(
        "eval", f"checkpoint={tmp_path / 'run' / 'checkpoints' / 'last.pt'}", "training.eval_batch_size=2"
    ).output
    assert "on the validation split" in table
    assert "accuracy" in table
    for changed, had in (("run.seed=4", "run.seed=0 to 4"), ("data.validation_fraction=0.3", "fraction=0.25 to 0.3")):
        with pytest.raises(ConfigError, match=rf"{had}: cannot change"):
            run("eval", f"run={tmp_path / 'run'}", changed)
    (tmp_path / "other.csv").write_bytes((tmp_path / "pairs.csv").read_bytes())
    moved = run("eval", f"run={tmp_path / 'run'}", f"data.path={tmp_path / 'other.csv'}", "run.device=cpu", "--json")
    assert json.loads(moved.output)["metrics"] == judged["metrics"]


def test_settings_are_shown_and_nothing_is_trained(tmp_path, run):
    shown = run("train", "training.num_epochs=7", f"run.folder={tmp_path / 'run'}", "--show")
    assert "num_epochs: 7" in shown.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "training.num_epoch=3"], "did you mean training.num_epochs"),
        (["train", "run.resume=nowhere"], "no such folder"),
        (["train", "--config", "nowhere.yaml"], "no such file"),
        (["eval", "run=nowhere"], "no such folder"),
        (["eval", "checkpoint=nowhere.pt"], "no such file"),
        (["eval", "training.batch_size=3"], "expected one of checkpoint=FILE and run=FOLDER"),
        (["eval", "run="], "expected one of checkpoint=FILE and run=FOLDER"),
    ],
)
def test_wrong_usage_is_told(run, arguments, message):
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


PROGRAM = """
import torch, hotloop
print("of the program")
def make(rows: int = 8, broken: bool = False):
    if broken:
        raise RuntimeError("the data base is away")
    if rows < 0:
        torch.ones(rows)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(x, y):
        loss = (model(x).squeeze(-1) - y).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        if rows == 9:
            raise KeyError("a row")
        return loss
    def metrics():
        return {"bias": float(model.bias.detach())} if rows != 7 else {}["bias"]
    batches = [(torch.ones(rows, 3), torch.ones(rows))] * 2
    return hotloop.Workload(model, optimizer, step, batches, metrics=metrics)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return [f"{tmp_path / 'program.py'}:make", f"run.folder={tmp_path / 'run'}", "training.num_epochs=2"]


def test_a_dry_run_says_what_would_run_and_writes_nothing(tmp_path, run, program):
    recipe = run("train", *overrides(tmp_path), "--dry-run")
    assert recipe.exit_code == 0
    for line in ("[torch.compile] Disabled", "Dry run: "):
        assert line in recipe.output
    own = run("train", *program, "program.rows=5", "training.optimization.use_torch_compile=true", "--dry-run")
    assert own.exit_code == 0
    assert "Run: " not in own.output
    assert "model default" in own.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["program.rows=x"], "integer"),
        (["recipe.goal=max:accuracy"], "the metrics of .* are bias"),
        (["program.broken=true"], "RuntimeError: the data base is away"),
        (["program.rows=7"], "KeyError: 'bias'"),
        (["training.num_epoch=3"], "did you mean training.num_epochs"),
    ],
)
def test_a_dry_run_ends_with_2_whatever_is_wrong(tmp_path, run, program, arguments, message):
    checked = run("train", *program, *arguments, "--dry-run")
    assert checked.exit_code == 2
    assert re.search(message, checked.stderr)
    assert not (tmp_path / "run").exists()


def test_a_script_gets_one_document_and_a_quiet_run_one_line(tmp_path, run, program):
    trained = run("train", *program, "recipe.goal=max:bias", "--json")
    outcome = json.loads(trained.stdout)
    assert (outcome["status"], outcome["step"]) == ("finished", 4)
    assert list(outcome["best"]) == ["bias"]
    assert [Path(one).name for one in outcome["checkpoints"]] == ["best.pt", "last.pt"]
    assert "of the program" in trained.stderr
    assert "step 4/4" in trained.stderr
    quiet = run("train", *program, f"run.folder={tmp_path / 'quiet'}", "recipe.goal=max:bias", "--quiet")
    assert re.fullmatch(rf"finished: step 4, bias [\d.-]+, {re.escape(str(tmp_path / 'quiet'))}\n", quiet.stdout)
    assert "step" not in quiet.stderr
    with pytest.raises(ConfigError, match="holds a run already"):
        run("train", *program, "--quiet")


def failed(capfd, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    printed = capfd.readouterr()
    return ended.value.code, printed.out, printed.err


@pytest.mark.parametrize(
    ("was", "now"), [("def step(x, y):", "def step(x):"), ("metrics=", "before=lambda batch: batch, metrics=")]
)
def test_a_function_of_one_argument_is_told_that_a_tuple_is_several(tmp_path, run, program, was, now):
    (tmp_path / "program.py").write_text(PROGRAM.replace(was, now))
    told = r"too many positional arguments in .*expected def (step|before)\(x, y\) for a tuple of 2$"
    dry = run("train", *program, "--dry-run")
    assert dry.exit_code == 2
    assert re.search(told, dry.stderr.strip())
    with pytest.raises(ConfigError, match=told):
        run("train", *program)


def test_an_error_of_the_program_is_shown_from_its_own_lines_on(tmp_path, capfd, program):
    code, _, shown = failed(capfd, "train", *program, "program.rows=-4")
    assert code == 1
    frames = re.findall(r'File "(.*)", line \d+, in (\w+)', shown)
    assert [(Path(file).name, function) for file, function in frames] == [("program.py", "make")]
    assert "negative dimension -4: [-4]\n" in shown


def test_a_failed_command_prints_one_document(capfd, program):
    ended, out, _ = failed(capfd, "train", *program, "program.rows=-4", "--dry-run", "--json")
    found = json.loads(out)
    assert ended == 2
    assert "negative dimension -4: [-4]" in found.pop("error")
    assert found == {"status": "failed", "folder": None, "go_on": None}


def test_the_document_of_a_failed_run_has_its_folder_and_the_command_that_goes_on(tmp_path, capfd, program):
    _, out, _ = failed(capfd, "train", *program, "program.rows=9", "--json")
    folder = str(tmp_path / "run")
    again = f"hotloop train run.resume={folder}"
    assert json.loads(out) == {"status": "failed", "error": "KeyError: 'a row'", "folder": folder, "go_on": again}


def test_a_misspelt_option_is_answered_with_the_option(capfd, program):
    code, _, shown = failed(capfd, "train", *program, "--jsn")
    assert code == 2
    assert "--json" in shown
