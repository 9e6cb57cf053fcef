"""The examples of the integrations are programs that train."""

import importlib.util
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

EXAMPLES = Path(__file__).parents[2] / "examples"


def program(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(autouse=True)
def _fresh_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_trainer():
    trainer = program("trainer").main(run="eager", trials=1)
    assert trainer.hot.status().step == 18


def test_accelerated():
    status, losses = program("accelerated").main(run="auto", steps=12)
    assert status.asked == "auto"
    assert losses[-1] < losses[0]


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_lora():
    status, losses = program("lora").train("aot_eager", steps=2)
    assert losses[1] < losses[0]
    assert status.components["unet"].state == "compiled"
    assert status.components["unet"].frames_compiled == 4
    assert {name for name, one in status.components.items() if one.requested == "none"} == {"vae", "text_encoder"}
    assert torch.isfinite(torch.tensor(losses)).all()


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_lora_from_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lora.py", "--preset", "none", "--steps", "2"])
    program("lora").main()
    said = capsys.readouterr().out
    assert "unet" in said
    assert [line.partition(":")[0] for line in said.splitlines() if "at the last" in line] == ["pen", "ink"]
