"""The code on the pages of the integrations runs unchanged, with the objects that a reader has."""

import functools
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from fitting import SmallClassifier, small_batches
from lightning.fabric import Fabric
from test_diffusers import small_unet, small_vae
from test_lightning import Sgd
from test_lightning_conformance import loader
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import hotloop
from hotloop.integrations.diffusers import Parts

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
pytestmark = pytest.mark.filterwarnings("default")  # the frameworks warn of their own use of torch


@pytest.fixture(autouse=True)
def _fresh_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def run_page(name, around):
    """Run each block of a page with the names that ``around`` makes, and return the names of all blocks."""
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    left = {}
    for block in blocks:
        here = {**left, **around()}
        quick = re.sub(r'HotLoop\((run=)?"(full|default)"\)', 'HotLoop("aot_eager")', block)  # no kernels to compile
        exec(compile(quick, f"{name}.md", "exec"), here)
        left |= here
    return left


def small_bert():
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    return BertForSequenceClassification(config)


def test_lightning():
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = functools.partial(pl.Trainer, **quiet, enable_model_summary=False, max_epochs=1)
    left = run_page("lightning", lambda: {"Trainer": trainer})
    left["trainer"].fit(Sgd(SmallClassifier()), loader(small_batches(16)))
    (callback,) = [one for one in left["trainer"].callbacks if isinstance(one, left["HotLoop"])]
    assert "asked for: auto" in str(callback.status())


def test_fabric():
    def around():
        model = SmallClassifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"fabric": Fabric(accelerator="cpu", devices=1), "model": model, "optimizer": optimizer, "F": F}

    left = run_page("fabric", around)
    losses = torch.stack([left["train_step"](*batch).detach() for batch in small_batches(2)])
    assert torch.isfinite(losses).all()
    assert hotloop.status(left["model"]).components["model"].requested == "default", "the last block's"


@pytest.mark.campaign
def test_transformers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"input_ids": [number % 16] * 4, "labels": number % 3} for number in range(16)]
    args = TrainingArguments("out", use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=2)
    trained = []

    class Counts(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.train()
            trained.append(self.state.global_step)

    around = {"model": small_bert(), "args": args, "data": rows, "Trainer": Counts}
    run_page("transformers", lambda: dict(around))
    assert trained == [2]
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!")


def test_accelerate():
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.tensor([0, 1])}

    def around():
        model = small_bert()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        more = {"accelerator": Accelerator(cpu=True), "loader": [batch], "hotloop": hotloop, "steps": 4}
        return {"model": model, "optimizer": optimizer, **more}

    left = run_page("accelerate", around)
    losses = [float(left["train_step"](batch).detach()) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_diffusers():
    parts = {"unet": small_unet(), "vae": small_vae(), "text_encoder": torch.nn.Embedding(4, 8)}
    left = run_page("diffusers", lambda: {**parts, "pipeline": Parts(**parts)})
    found = hotloop.status(left["pipeline"]).components
    assert {name: one.requested for name, one in found.items() if one.requested != "none"} == {
        "unet": "default",
        "vae": "default",
    }
