"""Modules that are compiled one by one are all called ``model``: what people read tells them apart by their classes."""

import logging

import torch
from torch import nn

import hotloop


class Generator(nn.Linear):
    pass


class Judge(nn.Linear):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def test_log_lines_and_status_name_modules_that_were_compiled_separately_by_their_classes(caplog):
    caplog.set_level(logging.INFO, "hotloop")
    generator = hotloop.compile(Generator(4, 4), "aot_eager")
    judges = [hotloop.compile(Judge(4, 1), "aot_eager") for _ in range(2)]
    for judge in judges:
        judge(generator(torch.randn(2, 4))).sum().backward()
    named = [hotloop.status(module).components["model"].name for module in (generator, *judges)]
    assert named == ["model (Generator)", "model (Judge)", "model (Judge 2)"]
    breaks = [record.getMessage() for record in caplog.records if ": graph break at " in record.getMessage()]
    assert [line.split(":")[0] for line in breaks] == [named[1]]  # torch tells of each place once
    table = str(hotloop.status(judges[1]))
    assert "model (Judge" in table


def test_a_module_that_is_compiled_alone_is_model(caplog):
    caplog.set_level(logging.INFO, "hotloop")
    judge = hotloop.compile(Judge(4, 1), "aot_eager")
    judge = hotloop.compile(judge, "default", inference="none")  # in the place of the first
    assert hotloop.status(judge).components["model"].name == "model"


def test_a_wrapper_is_named_by_the_model_in_it():
    class DistributedDataParallel(nn.Module):
        """What torch's own is taken for, without processes."""

        def __init__(self, module):
            super().__init__()
            self.module = module

    wrapped = [hotloop.compile(DistributedDataParallel(one), "aot_eager") for one in (Generator(4, 4), Judge(4, 1))]
    named = [hotloop.status(module).components["model"].name for module in wrapped]
    assert named == ["model (Generator)", "model (Judge)"]
