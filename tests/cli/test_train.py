import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotloop.cli import app
from hotloop.errors import ConfigError, DataError

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


def test_settings_are_shown_and_nothing_is_trained(tmp_path, run):
    shown = run("train", "training.num_epochs=7", f"run.folder={tmp_path / 'run'}", "--show")
    assert "num_epochs: 7" in shown.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "training.num_epoch=3"], "did you mean training.num_epochs"),
        (["train", "recipe=criterion"], "did you mean criteria"),
        (["train", "run.resume=nowhere"], "no such folder"),
        (["train", "--config", "nowhere.yaml"], "no such file or folder"),
        (["eval", "run=nowhere"], "no such folder"),
        (["eval", "checkpoint=nowhere.pt"], "no such file"),
        (["eval", "training.batch_size=3"], "expected one of checkpoint=FILE and run=FOLDER"),
        (["eval", "run="], "expected one of checkpoint=FILE and run=FOLDER"),
    ],
)
def test_wrong_usage_is_told(run, arguments, message):
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_bad_rows_are_told_before_anything_is_written(tmp_path, run):
    (tmp_path / "pairs.csv").write_text("text,criterion,label,group\na,b,perhaps,g\n")
    with pytest.raises(DataError, match="line 2: label is 'perhaps'"):
        run("train", *overrides(tmp_path))
    assert not (tmp_path / "run").exists()
