"""Fits of transformers' Trainer, as the conformance suite asks for them."""

from conformance import Conformance
from fitting import Fitted, SmallClassifier
from python_in_steps import weighed
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.data import SequentialSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hotloop.integrations.transformers import HotLoop

ARGUMENTS = {
    "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 2, "lr_scheduler_type": "constant",
    "logging_steps": 1, "save_strategy": "no", "dataloader_pin_memory": False,
}  # fmt: skip


def small_bert(**settings):
    config = BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, num_labels=3,
        **{"problem_type": "single_label_classification", **settings},
    )  # fmt: skip
    return BertForSequenceClassification(config)


class SmallModel(PreTrainedModel):
    """The suite's model as a transformers model: it returns its loss, and is saved with its tied weight once.

    A BERT, which takes four times as long to trace, is fitted in `test_transformers`.
    """

    config_class = PreTrainedConfig
    _tied_weights_keys = {"net.widen.weight": "net.embed.weight"}

    def __init__(self, config=None):
        super().__init__(config or PreTrainedConfig())
        self.net = SmallClassifier()
        self.post_init()

    def forward(self, input_ids, labels=None):
        logits = self.net(input_ids)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def in_order(kind, python):
    """A Trainer that takes its data in order, with a loss that the suite weighs."""

    class InOrder(kind):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return found if return_outputs else weighed(found, python)

        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(self.train_dataset)

    return InOrder


class Before(TrainerCallback):
    """A callback that reports each batch to the suite."""

    def __init__(self, begin):
        self.begin = begin

    def on_step_begin(self, args, state, control, **_):
        self.begin()


class TrainerConformance(Conformance):
    kind = Trainer

    def fit(self, task):
        batches = [{"input_ids": ids, "labels": labels} for ids, labels in task.batches]
        validation = [{"input_ids": ids, "labels": labels} for ids, labels in task.validation]
        args = TrainingArguments(
            str(task.save or "/nonexistent/never-written"),
            per_device_train_batch_size=1, per_device_eval_batch_size=1, learning_rate=0.01,
            num_train_epochs=task.epochs, gradient_accumulation_steps=task.accumulate,
            eval_strategy="epoch" if validation else "no",
            **{**ARGUMENTS, "save_strategy": "epoch" if task.save else "no", "use_cpu": task.device == "cpu"},
        )  # fmt: skip
        hot = HotLoop(task.run) if task.run is not None else None
        trainer = in_order(self.kind if hot else Trainer, task.python)(
            task.model, args, data_collator=lambda samples: samples[0], train_dataset=batches,
            eval_dataset=validation or None, callbacks=[Before(task.begin), *([hot] if hot else [])],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=str(next(task.resume.iterdir())) if task.resume else None)
        begun = len(batches) if task.resume else 0
        losses = [one["loss"] for one in trainer.state.log_history if "loss" in one and one["step"] > begun]

        def remove():
            if hot:
                trainer.remove_callback(hot)
            vars(task.model).pop("_is_accelerate_prepared", None)  # Accelerate's own mark, in an eager run as well

        return Fitted(
            model=task.model, losses=losses, optimizer=trainer.optimizer.state_dict(),
            status=hot and hot.status(), record=hot and hot.record, remove=remove,
        )  # fmt: skip

    def saved(self, path):
        return load_file(next(path.iterdir()) / "model.safetensors")

    def model(self):
        return SmallModel()
