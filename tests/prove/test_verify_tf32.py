"""TF32 in its two ways: eager's products round their factors, autotuned ones may cut them, and both are right."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from verify_programs import batches, workload

import hotloop
from hotloop._torch import backends
from hotloop._torch.products import in_tf32, products_in_tf32
from hotloop.presets import PRESETS, Preset
from hotloop.prove.verify import verify

TUNED = Preset(name="tuned", backend="inductor", options={"max_autotune": True}, ladder=())
PLAIN = Preset(name="plain", backend="inductor", ladder=())
PRODUCTS = {"aten.mm": (0, 1), "aten.addmm": (1, 2)}


def test_numbers_of_tf32_are_the_nearest_or_the_next_below():
    numbers = torch.tensor([1.0, -1.0, 1 + 2**-11 + 2**-20, -(1 + 2**-11 + 2**-20), 1 + 2**-12, 3e38, float("inf")])
    step = 2**-10
    assert in_tf32(numbers, "cut").tolist()[:5] == [1.0, -1.0, 1.0, -1.0, 1.0]
    assert in_tf32(numbers, "rounded").tolist()[:5] == [1.0, -1.0, 1 + step, -(1 + step), 1.0]
    for how in ("cut", "rounded"):
        assert torch.equal(in_tf32(in_tf32(numbers, how), how), in_tf32(numbers, how))
        assert in_tf32(numbers, how)[-1] == torch.inf
        assert torch.equal(in_tf32(numbers.double(), how), numbers.double())
        assert in_tf32(torch.ones(1, dtype=torch.bfloat16), how).dtype == torch.bfloat16


def test_products_lean_by_what_their_factors_lose():
    """Two factors, each 3.5e-4 too small on the average; also in a backward, and of a convolution."""
    torch.manual_seed(0)
    layers = nn.Linear(512, 64, bias=False), nn.Conv1d(64, 64, 3)
    x = torch.rand(8, 32, 512) + 0.1
    made = {}
    for how in ("rounded", "cut"):
        with products_in_tf32(how):
            hidden = layers[0](x)
            layers[1](hidden.transpose(1, 2)).square().sum().backward()
        made[how] = [hidden.detach(), *(one.weight.grad for one in layers)]
        for one in layers:
            one.zero_grad()
    tilts = [float(((c - r) * r).sum() / (r * r).sum()) for r, c in zip(*made.values(), strict=True)]
    assert -9e-4 < tilts[0] < -5e-4
    assert all(tilt < -15e-4 for tilt in tilts[1:])


def test_presets_say_whether_they_autotune():
    assert [name for name, one in PRESETS.items() if one.autotunes] == [
        "inductor",
        "triton",
        "max-autotune",
        "max-autotune-no-cudagraphs",
    ]
    assert not PRESETS["inductor"].with_(options={"max_autotune": False}).autotunes


@pytest.fixture
def compiler(monkeypatch):
    """Compile as Triton multiplies, as on a machine with TF32; ``factor`` scales the result of gelu."""
    from torch._dynamo.backends.common import aot_autograd

    given = {"factor": 1.0}

    def cutting(graph, _inputs):
        nodes = graph.graph
        for node in list(nodes.nodes):
            name = str(getattr(node.target, "overloadpacket", ""))
            for index in PRODUCTS.get(name, ()):
                with nodes.inserting_before(node):
                    node.update_arg(index, nodes.call_function(in_tf32, (node.args[index], "cut")))
            if name == "aten.gelu_backward":
                with nodes.inserting_after(node):
                    scaled = nodes.call_function(torch.mul, (node, given["factor"]))
                node.replace_all_uses_with(scaled, delete_user_cb=lambda user, own=scaled: user is not own)
        graph.recompile()

        def run(args):
            return graph.forward(*args)

        run._boxed_call = True
        return run

    made = aot_autograd(fw_compiler=cutting, bw_compiler=cutting, inference_compiler=cutting)
    monkeypatch.setattr(backends, "inductor", lambda *_: made)
    monkeypatch.setattr(verify, "compute_dtype", lambda *_: "tf32")
    return given


def program(optimizer=None):
    """Layers without normalisation: each makes the lean larger."""
    torch.manual_seed(0)
    widths = [16, 64, 64, 64, 64]
    layers = [part for into, out in itertools.pairwise(widths) for part in (nn.Linear(into, out), nn.GELU())]
    return workload(nn.Sequential(*layers, nn.Linear(64, 5)), data=batches(size=128), optimizer=optimizer)


def sgd(parameters):
    """Updates lean as gradients do."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@pytest.mark.parametrize("optimizer", [None, sgd])
def test_products_that_cut_are_right_under_a_preset_that_may_choose_them(compiler, optimizer):
    verdict = hotloop.verify(program(optimizer), TUNED)
    assert verdict.passes, verdict
    assert verdict.compute_dtype == "tf32"
    assert verdict.reference == "float64"


def test_under_another_preset_they_are_not_expected(compiler):
    verdict = hotloop.verify(program(), PLAIN, search=False)
    assert not verdict.passes
    assert verdict.worst[0].measure == "slope"


def test_what_leans_more_is_wrong(compiler):
    compiler["factor"] = 0.98
    verdict = hotloop.verify(program(), TUNED, search=False)
    assert not verdict.passes
    assert verdict.worst[0].measure == "slope"
