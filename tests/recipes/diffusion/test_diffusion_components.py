"""The component matrix: each network of a diffusion model fails in forward or backward while the others stay compiled."""

import copy

import pytest
import torch
from diffusion_networks import tiny_denoiser
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import hotloop
from hotloop._torch import backends
from hotloop.recipes.diffusion.denoiser import mean_square
from hotloop.testing import captured_step_emulation
from hotloop.train import batches
from hotloop.train.average import Average

CLASSES = {"CrossAttnDownBlock2D": "unet", "CLIPEncoderLayer": "text_encoder", "DownEncoderBlock2D": "vae"}
"""A module that each network has, and no other."""
NAMES = ("unet", "text_encoder", "vae")


def component_of(graph):
    """Name the network that one of dynamo's graphs is of, by the classes that its nodes come from."""
    stacks = [stack for node in graph.graph.nodes for stack in node.meta.get("nn_module_stack", {}).values()]
    kinds = {(kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2] for _, kind in stacks}
    (found,) = (name for kind, name in CLASSES.items() if kind in kinds)
    return found


@pytest.fixture
def plant(monkeypatch):
    """Have the compiled code of one component fail in one stage; gives how often it did."""

    def put(component, stage):
        fired = []

        def fail():
            fired.append(stage)
            torch._check(False, lambda: "planted")  # raised by torch's own code: what ours raises passes as the user's

        def lower(phase, hit):
            def compiled(graph, inputs):
                if hit and stage == f"{phase} compile":
                    fail()
                return make_boxed_func(graph.forward)

            return compiled

        def compiler(graph, inputs):
            hit = component_of(graph) == component
            return aot_autograd(fw_compiler=lower("forward", hit), bw_compiler=lower("backward", hit))(graph, inputs)

        monkeypatch.setattr(backends, "aot_eager", lambda: compiler)
        return fired

    return put


def everything_trains():
    """A denoiser of which all three networks have gradients, and what its steps take."""
    denoiser, found = tiny_denoiser(text=True)
    found.vae.requires_grad_(requires_grad=True)
    torch.manual_seed(1)
    batch = {
        "noise": torch.randn(2, 2, 4, 4), "timesteps": torch.tensor([30, 600]), **found.token_ids(["a", "digit"])
    }  # fmt: skip
    return denoiser, torch.rand(2, 1, 4, 4), batch


def step(denoiser, optimizer, pixels, batch):
    """A step whose gradients reach the VAE as well."""
    torch.manual_seed(2)
    mean, logvar = denoiser.vae(pixels)
    loss = mean_square(denoiser(mean=mean, logvar=logvar, **batch), batch["timesteps"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(denoiser, pixels, batch, steps=2):
    optimizer = torch.optim.SGD(denoiser.parameters(), lr=0.01)
    return [step(denoiser, optimizer, pixels, batch) for _ in range(steps)]


@pytest.mark.campaign
@pytest.mark.parametrize("stage", ["forward compile", "backward compile"])
@pytest.mark.parametrize("component", NAMES)
@pytest.mark.some_of(2)
def test_a_component_that_cannot_be_compiled_runs_eager_and_the_others_compiled(plant, component, stage):
    denoiser, pixels, batch = everything_trains()
    eager = copy.deepcopy(denoiser)
    fired = plant(component, stage)
    parts = denoiser.parts()
    hotloop.compile(parts, dict.fromkeys(NAMES, "aot_eager"))
    losses = train(denoiser, pixels, batch)
    assert fired, "a test in which nothing failed has tested nothing"
    found = hotloop.status(parts).components
    assert {name: one.running for name, one in found.items()} == {
        name: "none" if name == component else "aot_eager" for name in NAMES
    }
    assert any("planted" in cause.reason for cause in found[component].causes)
    assert all(one.state == "compiled" for name, one in found.items() if name != component)
    torch.testing.assert_close(losses, train(eager, pixels, batch), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(denoiser.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.campaign
def test_compiled_together_all_three_train_as_eager_does_without_a_break():
    denoiser, pixels, batch = everything_trains()
    eager = copy.deepcopy(denoiser)
    parts = denoiser.parts()
    hotloop.compile(parts, dict.fromkeys(NAMES, "aot_eager"))
    losses = train(denoiser, pixels, batch)
    found = hotloop.status(parts).components.values()
    assert [(one.state, one.graph_breaks, one.recompiles) for one in found] == [("compiled", 0, 0)] * 3
    torch.testing.assert_close(losses, train(eager, pixels, batch), rtol=1e-5, atol=1e-6)


class Sizes(batches.Table):
    """Latents of some aspect ratios, four rows each, and the tokens of one caption."""

    apart = True
    SHAPES = ((4, 4), (2, 8), (8, 2))

    def __init__(self, ids, sizes):
        rows = torch.arange(4 * sizes)
        super().__init__({"input_ids": ids.repeat(len(rows), 1)}, rows)
        self.bucket, self.buckets = rows // 4, sizes

    def take(self, rows):
        (bucket,) = self.bucket[rows].unique().tolist()
        generator = torch.Generator().manual_seed(int(rows[0]))
        mean = torch.randn(len(rows), 2, *self.SHAPES[bucket], generator=generator)
        noise = torch.randn(mean.shape, generator=generator)
        more = {"mean": mean, "logvar": mean - 30, "noise": noise, "timesteps": 80 * rows}
        return batches.Batch({**super().take(rows).inputs, **more}, rows)


@pytest.mark.campaign
@pytest.mark.parametrize(("tier", "sizes"), [("eager+graph", 3), ("aot_eager", 2)])
def test_each_aspect_ratio_has_one_graph_of_its_own_and_no_more(tier, sizes):
    """Two compiled sizes are enough to see one that is compiled for any size."""
    denoiser, found = tiny_denoiser()
    eager, data = copy.deepcopy(denoiser), Sizes(found.token_ids(["a digit"])["input_ids"], sizes)
    optimizer, beside = (torch.optim.SGD(one.unet.parameters(), lr=0.01) for one in (denoiser, eager))
    average, theirs_too = (Average(one, 0.9) for one in (denoiser, eager))

    def update(model, optimizer, average, given):
        loss = sum(mean_square(model(**batch.inputs), batch.labels) for batch in given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        return loss.detach()

    with captured_step_emulation():
        loop = hotloop.Loop(denoiser.unet, optimizer, state=[denoiser, average], run=tier, sentinel=0)
        with loop:
            run = loop.step(lambda given: update(denoiser, optimizer, average, given))
            for epoch in range(6):
                for rows in batches.epoch_order(data, 2, 0, epoch):
                    ours, theirs = run([data.take(rows)]), update(eager, beside, theirs_too, [data.take(rows)])
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
            for name, one in average.state_dict().items():
                torch.testing.assert_close(one, theirs_too.state_dict()[name], rtol=1e-4, atol=1e-6)
            status = loop.status()
            assert status.tier == tier, status.decisions
            if tier == "eager+graph":
                variants = loop._runners[0].capturing.kinds.values()
                assert [one.recording is not None for one in variants] == [True] * sizes
            else:
                part = loop.context.compiled.status().components["model"]
                assert part.modes["training"]["compiles"] == sizes, "one a size: none is compiled for any size"
