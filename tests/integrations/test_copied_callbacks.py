"""A Trainer with hotloop in it can be copied and pickled wherever a plain one can."""

import copy
import io
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from trainer_fits import ARGUMENTS, small_bert
from transformers import TrainingArguments

from hotloop.integrations import transformers

pytestmark = pytest.mark.filterwarnings("default")  # the frameworks warn of their own use of torch


def unpickled(value):
    return pickle.loads(pickle.dumps(value))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def fit(*callbacks):
    torch.manual_seed(1)
    module = BoringModel()
    trainer = pl.Trainer(
        max_steps=3, accelerator="cpu", callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    return trainer, torch.cat([one.detach().flatten() for one in module.parameters()])


def hot_trainer(folder, *callbacks):
    torch.manual_seed(1)
    data = [{"input_ids": torch.arange(6) + one, "labels": torch.tensor(1)} for one in range(8)]
    arguments = TrainingArguments(str(folder), max_steps=2, **ARGUMENTS)
    return transformers.HotTrainer(small_bert(), arguments, train_dataset=data, callbacks=list(callbacks))


def test_a_hot_trainer_is_copied_and_pickled_before_it_trains(tmp_path):
    trainer = hot_trainer(tmp_path, transformers.HotLoop(run="eager"))
    copies = [copy.deepcopy(trainer), unpickled(trainer)]
    torch.manual_seed(3)
    trainer.train()
    weights = dict(trainer.model.state_dict())
    for copied in copies:
        assert copied.hot is not trainer.hot
        assert copied.hot in copied.callback_handler.callbacks
        torch.manual_seed(3)
        copied.train()
        assert copied.hot.status().step == 2, "its own step is the loop's"
        torch.testing.assert_close(dict(copied.model.state_dict()), weights, rtol=0, atol=0)
