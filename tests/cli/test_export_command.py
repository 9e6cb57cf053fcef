"""``hotloop export``: its files are loaded back by other programs, with equal outputs."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from hotloop import record
from hotloop.cli import app
from hotloop.errors import ConfigError
from hotloop.train import checkpoint, export

PROGRAM = """
import torch, hotloop
def make(width: int = 4, rows: str = "here"):
    print("of the program")
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(x, y):
        loss = (model(x).squeeze(-1) - y).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        average.update_parameters(model)
        return loss
    def metrics():
        return {"mean": average.eval()(torch.ones(1, 3)).mean()}
    batches = [(torch.ones(8, 3), torch.ones(8))] * 4
    return hotloop.Workload(model, optimizer, step, batches, state=average, metrics=metrics)
"""


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(PROGRAM)
    invoke("train", f"{folder / 'program.py'}:make", "program.width=5", f"run.folder={folder / 'run'}", "-q")
    return folder / "run"


def averaged(run):
    """The program's model with the averages of its last checkpoint, by plain PyTorch."""
    kept = checkpoint.load(run / "checkpoints" / "last.pt")["others"]["state[0]"]
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 1)).eval()
    model.load_state_dict({name.removeprefix("module."): value for name, value in kept.items() if "." in name})
    return model


def test_safetensors_of_a_program_load_in_plain_pytorch_and_run_nothing_of_it(program, tmp_path):
    written = invoke("export", program, tmp_path / "out", "--json")
    assert "of the program" not in written.output
    found = json.loads(written.stdout)
    assert [Path(one).name for one in found["files"]] == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["settings"]["program"] == {"width": 5, "rows": "here"}
    assert (config["average"], config["checkpoint"], config["step"]) == (True, "last.pt", 4)
    model, x = averaged(program), torch.randn(4, 3)
    again = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 1)).eval()
    again.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(again(x), model(x))


PRETRAINED = """
import torch, hotloop
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification
def base():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1,
    ))
def make(adapters: bool = False):
    model = base()
    if adapters:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    def step(ids):
        loss = (model(input_ids=ids).logits - 1).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        return loss
    return hotloop.Workload(model, optimizer, step, [torch.arange(8).view(2, 4)] * 3)
"""


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("adapters", [False, True])
def test_what_a_program_of_transformers_or_peft_trained_is_loaded_by_it(tmp_path, adapters):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    (tmp_path / "own.py").write_text(PRETRAINED)
    settings = [f"{tmp_path / 'own.py'}:make", f"program.adapters={adapters}".lower(), f"run.folder={tmp_path / 'run'}"]
    invoke("train", *settings, "-q")
    invoke("export", tmp_path / "run", tmp_path / "out", "--format", "pretrained")
    names: dict = {}
    exec(PRETRAINED, names)
    model = names["make"](adapters).model
    before = model.eval()(input_ids=torch.arange(4)[None]).logits
    model.load_state_dict(checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["model"]["model"])
    if adapters:
        again = peft.PeftModel.from_pretrained(names["base"](), tmp_path / "out")
    else:
        again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "out")
    found = again.eval()(input_ids=torch.arange(4)[None]).logits
    assert torch.equal(found, model.eval()(input_ids=torch.arange(4)[None]).logits)
    assert not torch.equal(found, before)


def test_an_average_that_is_not_begun_or_may_be_of_either_model_is_not_taken_for_the_weights():
    def held(models, *averages):
        kept = [{"n_averaged": torch.tensor(many), "module.w": value} for value, many in averages]
        others = {f"state[{place}]": one for place, one in enumerate(kept)}
        found, averaged = export.weights({"model": {name: {"w": 0} for name in models}, "others": others})
        return [one["w"] for one in found.values()], averaged

    assert held("a", (1, 3)) == ([1], True)
    assert held("a", (1, 0)) == ([0], False)
    assert held("ab", (1, 3)) == ([0, 0], False)
    assert held("ab", (1, 3), (2, 3)) == ([1, 2], True)


def test_a_program_that_judges_its_average_is_evaluated_by_it(program):
    judged = json.loads(invoke("eval", f"run={program}", "--json").stdout)["metrics"]
    assert judged["mean"] == pytest.approx(record.load(program)["metrics"][-1]["mean"])


def test_what_cannot_be_exported_is_told(program, tmp_path):
    refused = {
        ("export", program, program): "exists already",
        ("export", program, tmp_path / "out", "--format", "pretrained"): "Sequential, which has no save_pretrained",
        (
            "export",
            program,
            tmp_path / "out",
            "--checkpoint",
            "best",
        ): "has no checkpoint: expected checkpoints/best.pt",
        ("export", tmp_path / "nowhere"): "no such folder",
        ("eval", f"run={program}", "program.width=9"): "program.width=5 to 9: cannot change",
    }
    for arguments, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            invoke(*arguments)
    assert list(tmp_path.iterdir()) == []


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ("def make(", "def build(", "has no function 'make'; it defines build"),
        ("Linear(width, 1)", "Linear(width, 120)", "weights do not fit .*size mismatch for 2.weight"),
    ],
)
def test_a_program_that_has_changed_since_its_run_is_told_with_what_no_longer_fits(program, was, now, message):
    file = program.parent / "program.py"
    file.write_text(PROGRAM.replace(was, now))
    try:
        with pytest.raises(ConfigError, match=f"program.py:make has changed since this run; put it back.*{message}"):
            invoke("eval", f"run={program}")
    finally:
        file.write_text(PROGRAM)


def test_a_hostile_run_executes_nothing_and_writes_nowhere_else(program, tmp_path):
    document = checkpoint.load(program / "checkpoints" / "last.pt")
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    for name in ("../../x", "/tmp/x", ".hidden", "a/b", ""):
        checkpoint.save(last, {**document, "model": {name: document["model"]["model"]}, "others": {}})
        with pytest.raises(ConfigError, match="cannot be the name of a file"):
            invoke("export", tmp_path / "run", tmp_path / "out")
    last.write_bytes(pickle.dumps({"schema": 1, "model": Evil()}))
    with pytest.raises(ConfigError, match="cannot be read"):
        invoke("export", tmp_path / "run", tmp_path / "out")
    assert [one.name for one in tmp_path.iterdir()] == ["run"]
