"""The conformance suite on transformers' Trainer: with the callback alone, and with the step in hotloop's hands."""

from trainer_fits import TrainerConformance
from transformers import Trainer

from hotloop.integrations.transformers import HotTrainer

RAISED = "raised with cause and remedy: a plain Trainer keeps its training step to itself"


class TestTrainer(TrainerConformance):
    kind = Trainer
    limits = {
        "test_failing_run_of_a_forward": RAISED,
        "test_failing_run_of_a_backward": RAISED,
        "test_captured_step": "a plain Trainer keeps its training step to itself",
    }


class TestHotTrainer(TrainerConformance):
    kind = HotTrainer
