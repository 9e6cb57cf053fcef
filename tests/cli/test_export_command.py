"""``hotloop export`` and ``hotloop predict``: what they write is loaded back by other programs, with equal outputs."""

import csv
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from hotloop import record
from hotloop.cli import app
from hotloop.errors import ConfigError, DataError
from hotloop.train import checkpoint, export, predict

sys.path.append(str(Path(__file__).parents[1] / "train"))
from training_fixtures import overrides

# torch 2.11's torch.export.load makes tensors of bytes and warns of them, once in a process.
reads_a_program = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
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
    def predict(rows):
        found = torch.tensor([[float(row[name]) for name in "abc"] for row in rows])
        return (model(found) + average(found)).squeeze(-1) / 2
    def metrics():
        return {"mean": average.eval()(torch.ones(1, 3)).mean()}
    batches = [(torch.ones(8, 3), torch.ones(8))] * 4
    return hotloop.Workload(model, optimizer, step, batches, state=average, predict=predict, metrics=metrics)
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


@pytest.fixture(scope="module")
def criteria(tmp_path_factory):
    folder = tmp_path_factory.mktemp("criteria")
    invoke("train", *overrides(folder, training__max_steps=2), "-q")
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


@reads_a_program
def test_an_exported_program_computes_the_same_for_another_size_of_batch(program, tmp_path):
    said = invoke("export", program, tmp_path / "out", "--format", "torch-export", "--json").stdout
    assert json.loads(said)["format"] == "torch-export"
    again, x = torch.export.load(tmp_path / "out" / "model.pt2").module(), torch.randn(5, 3)
    assert torch.equal(again(x), averaged(program)(x))


@pytest.mark.campaign
@reads_a_program
def test_the_encoder_of_a_recipe_loads_in_transformers(criteria, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    invoke("export", criteria, tmp_path / "out", "--format", "pretrained")
    assert json.loads((tmp_path / "out" / "hotloop.json").read_text())["recipe"] == "criteria"
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    inputs = AutoTokenizer.from_pretrained(tmp_path / "out")(["fever arm"], ["fever acute"], return_tensors="pt")
    (tmp_path / "data.jsonl").write_text('{"text": "fever arm", "criterion": "fever acute", "id": 7}\n')
    row = json.loads(invoke("predict", criteria, tmp_path / "data.jsonl").stdout)
    logit = model(**inputs).logits.item()
    assert row["logit"] == pytest.approx(logit, abs=1e-6)
    assert row["score"] == pytest.approx(torch.tensor(logit).sigmoid().item(), abs=1e-6)
    assert (row["id"], row["text"]) == (7, "fever arm")
    invoke("export", criteria, tmp_path / "exported", "--format", "torch-export", "--checkpoint", "best")
    again = torch.export.load(tmp_path / "exported" / "model.pt2").module()
    assert again(*inputs.values()).item() == pytest.approx(logit, abs=1e-6)


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


def test_rows_of_a_csv_are_predicted_in_batches_and_written_whole(program, tmp_path):
    rows = torch.randn(5, 3)
    with (tmp_path / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "c"], *rows.tolist()])
    said = invoke("predict", program, tmp_path / "data.csv", "--out", tmp_path / "out.csv", "--batch-size", 2).stdout
    assert said == f"5 rows: {tmp_path / 'out.csv'}\n"
    with (tmp_path / "out.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["a", "b", "c", "prediction"]
    expected = averaged(program)(rows).squeeze(-1).tolist()
    assert [float(one["prediction"]) for one in found] == pytest.approx(expected, abs=1e-6)
    shown = invoke("predict", program, tmp_path / "data.csv", "program.rows=there", "--batch-size", 2).stdout
    assert shown == (tmp_path / "out.csv").read_text()


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


def test_an_average_of_a_programs_own_class_is_left_out_and_that_is_said(program, tmp_path):
    shutil.copytree(program, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "last.pt"
    document = checkpoint.load(path)
    assert "Exported: the average of the weights, of step 4\n" in invoke("export", program, tmp_path / "theirs").stderr
    document["others"] = {"state[0]": {"shadow": [torch.zeros(3)]}, "state[1]": {"scale": torch.tensor(1.0)}}
    checkpoint.save(path, document)
    said = invoke("export", tmp_path / "run", tmp_path / "own").stderr
    assert "Exported: the weights as trained, of step 4; not state[0] of state=: an average is exported if" in said
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert (config["average"], config["left_out"]) == (False, ["state[0]"])


def test_a_program_that_judges_its_average_is_evaluated_by_it(program):
    judged = json.loads(invoke("eval", f"run={program}", "--json").stdout)["metrics"]
    assert judged["mean"] == pytest.approx(record.load(program)["metrics"][-1]["mean"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.txt", "", "expected a file that ends with .csv or .jsonl"),
        ("data.jsonl", '{"text": "a"}\n[1]\n', "line 2: expected a JSON object"),
        ("data.jsonl", '{"text": "a", "criterion": 3}', "row 1 has no text 'criterion'"),
        ("data.csv", "text,criterion\na\n", "line 2: expected 2 values"),
        ("data.csv", "text\na\n", "row 1 has no text 'criterion'"),
    ],
)
def test_data_that_cannot_be_read_is_told_by_its_line(criteria, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        invoke("predict", criteria, tmp_path / name)


def test_what_cannot_be_exported_or_predicted_is_told(program, tmp_path):
    (tmp_path / "data.csv").write_text("a,b,c\n1,2,3\n")
    refused = {
        ("export", program, tmp_path): "exists already",
        ("export", program, tmp_path / "out", "--format", "pretrained"): "Sequential, which has no save_pretrained",
        (
            "export",
            program,
            tmp_path / "out",
            "--checkpoint",
            "best",
        ): "has no checkpoint: expected checkpoints/best.pt",
        ("export", tmp_path / "nowhere"): "no such folder",
        ("predict", program, tmp_path / "data.csv", "--out", tmp_path / "data.csv"): "another file than DATA",
        ("predict", tmp_path, tmp_path / "data.csv"): "has no checkpoint",
        ("predict", program, tmp_path / "data.csv", "run.acelerator=cpu"): "run.accelerator",
        ("predict", program, tmp_path / "data.csv", "program.width=9"): "program.width=5 to 9: cannot change",
        ("eval", f"run={program}", "program.width=9"): "program.width=5 to 9: cannot change",
    }
    for arguments, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            invoke(*arguments)
    assert [one.name for one in tmp_path.iterdir()] == ["data.csv"]


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ("def make(", "def build(", "has no function 'make'; it defines build"),
        ("width", "hidden", r"unknown setting program\.width: expected one of program\.hidden"),
        ("Linear(width, 1)", "Linear(width, 12)", "weights do not fit .*size mismatch for 2.weight"),
        ("SGD(", "AdamW(", "optimizer does not fit the AdamW .*KeyError: 'betas'"),
    ],
)
def test_a_program_that_has_changed_since_its_run_is_told_with_what_no_longer_fits(
    program, tmp_path, was, now, message
):
    file, rows, run = program.parent / "program.py", tmp_path / "rows.jsonl", tmp_path / "run"
    shutil.copytree(program, run)
    rows.write_text('{"a": 1, "b": 2, "c": 3}\n')
    commands = [
        ("train", f"run.resume={run}", "training.num_epochs=9"),
        ("eval", f"run={run}"),
        ("predict", run, rows),
        ("export", run, tmp_path / "out", "--format", "torch-export"),
    ]
    file.write_text(PROGRAM.replace(was, now))
    try:
        for one in commands[: 1 if was == "SGD(" else None]:
            with pytest.raises(
                ConfigError, match=f"program.py:make has changed since this run; put it back.*{message}"
            ):
                invoke(*one)
    finally:
        file.write_text(PROGRAM)


def test_what_is_a_file_or_a_search_is_answered_with_what_to_name_instead(program, tmp_path):
    search = tmp_path / "search"
    (search / "trials" / "0003" / "checkpoints").mkdir(parents=True)
    (search / "trials" / "0003" / "checkpoints" / "best.pt").touch()
    (search / "study.yaml").touch()
    best = program / "checkpoints" / "last.pt"
    for arguments, said in {
        ("export", search): f"is a search: name one of its runs, {search}/trials/0003",
        ("predict", program, "rows.csv"): "rows.csv: no such file",
        ("export", best): "is a file: expected the folder of the run",
        ("eval", program): f"did you mean run={program}?",
        ("eval", best): f"did you mean checkpoint={best}?",
        ("runs", "list", best): "is a file, and no folder of runs",
    }.items():
        with pytest.raises((ConfigError, DataError)) as caught:
            invoke(*arguments)
        assert said in str(caught.value)


def test_a_hostile_run_executes_nothing_and_writes_nowhere_else(program, tmp_path):
    document = checkpoint.load(program / "checkpoints" / "last.pt")
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    for name in ("../../x", "/tmp/x", ".hidden", "a/b", ""):
        checkpoint.save(last, {**document, "model": {name: document["model"]["model"]}, "others": {}})
        with pytest.raises(ConfigError, match="cannot be the name of a file"):
            invoke("export", tmp_path / "run", tmp_path / "out")
    checkpoint.save(last, {"model": [], "settings": "x", "position": None})
    with pytest.raises(ConfigError, match="has no part named model, settings, position"):
        invoke("export", tmp_path / "run", tmp_path / "out")
    last.write_bytes(pickle.dumps({"schema": 1, "model": Evil()}))
    with pytest.raises(ConfigError, match="cannot be read"):
        invoke("export", tmp_path / "run", tmp_path / "out")
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_row_of_jsonl_may_hold_other_ends_of_a_line(tmp_path):
    rows = [{"text": "a\u2028b\x85c"}, {"text": "d"}]
    (tmp_path / "rows.jsonl").write_text("\r\n".join(json.dumps(one, ensure_ascii=False) for one in rows), "utf-8")
    assert predict.read(tmp_path / "rows.jsonl") == rows


def test_a_prediction_for_each_row_is_needed(tmp_path):
    for wrong in (lambda rows: [1], lambda rows: 3, lambda rows: "ab", lambda rows: None):
        with pytest.raises(ConfigError, match="a prediction for each of 2 rows"):
            predict.predictions([{}, {}], wrong, 2)
    found = predict.predictions([{"a": 1}], lambda rows: [{"label": "x", "p": [0.5, 0.5]}], 2)
    assert found == [{"a": 1, "label": "x", "p": [0.5, 0.5]}]
    assert predict.written(found, ".csv") == 'a,label,p\n1,x,"[0.5, 0.5]"\n'
    assert predict.written(found, ".jsonl") == '{"a": 1, "label": "x", "p": [0.5, 0.5]}\n'
