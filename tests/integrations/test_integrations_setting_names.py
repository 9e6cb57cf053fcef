"""Every integration refuses an unknown setting by name, before anything is done."""

import lightning
import pytest
import torch

from hotloop.errors import ConfigError
from hotloop.integrations import diffusers, fabric
from hotloop.integrations.lightning import HotLoop


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda one, model: fabric.setup(one, model, run="auto"), r"fabric.setup\(run='auto'\).*Loop, which owns"),
        (lambda one, model: fabric.setup(one, model, dynamc=True), r"dynamc=True\).*did you mean 'dynamic'"),
        (lambda one, model: fabric.setup(one, model, reaply=True), r"reaply=True\).*did you mean 'reapply'"),
        (lambda one, model: fabric.setup(one, model, preset="auto"), r"Loop\(model, optimizer, run='auto'\)"),
        (
            lambda one, model: fabric.setup(one, [model]),
            r"fabric.setup\(Fabric, list, ...\): expected the Fabric first",
        ),
        (lambda _, model: diffusers.compile(diffusers.Parts(unet=model), region="blocks"), "did you mean 'regions'"),
        (lambda _, model: diffusers.compile(diffusers.Parts(unet=model), prset="default"), "did you mean 'preset'"),
        (lambda _, model: diffusers.compile(diffusers.Parts(unet=model), "auto"), r"preset='auto'.*hotloop.Loop"),
        (
            lambda one, model: fabric.loop(one, one.setup(model), None, total_step=5),
            r"fabric.loop\(total_step=5\).*did you mean 'total_steps'",
        ),
        (lambda one, model: fabric.loop(model, one, None), r"fabric.loop\(Linear, ...\): expected the Fabric first"),
        (lambda *_: HotLoop(rnu="auto"), r"HotLoop\(rnu='auto'\).*did you mean 'run'"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(call, message):
    one = lightning.Fabric(accelerator="cpu", devices=1)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=message):
        call(one, model)
    assert "forward" not in vars(model)
