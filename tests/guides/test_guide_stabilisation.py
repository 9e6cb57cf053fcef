"""The stabilisation guide: counters, shapes, re-entry, the one helper, the harness, and inference by its own switch."""

import json

import pytest
import torch
from guide_programs import Classifier, command
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.errors import StaleOutputError
from hotloop.testing import cudagraph_emulation


class Gist(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, items):
        return self.out(F.gelu(self.into(items))).mean(1)


class Lens(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(16, 1)

    def forward(self, gist, items):
        return self.score(torch.cat([gist.unsqueeze(1).expand_as(items), items], -1)).squeeze(-1)


class Ranker:
    """Two networks: trained in one batched call each, and asked by an allocator many times between the steps."""

    def __init__(self):
        torch.manual_seed(0)
        self.gist, self.lens = Gist(), Lens()
        self.optimizer = torch.optim.SGD([*self.gist.parameters(), *self.lens.parameters()], lr=0.05)

    def networks(self):
        return {"gist": self.gist, "lens": self.lens}

    def step(self, items, target):
        loss = F.cross_entropy(self.lens(self.gist(items), items), target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def allocate(self, items):
        """Choose three items greedily, and keep the outputs of the surest choice."""
        best = None
        for _ in range(3):
            gist = self.gist(items[:1])
            scores = self.lens(gist, items[:1])
            sure = scores.softmax(-1).max().item()
            if best is None or sure > best[0]:
                best = (sure, gist, scores)
            items = items * 0.5
        return best


def given(count):
    draw = torch.Generator().manual_seed(1)
    made = [torch.randn(4, 6, 8, generator=draw) for _ in range(count)]
    return [(items, items.sum(-1).argmax(-1)) for items in made]


def make():
    ranker = Ranker()

    def infer(items, target):
        return ranker.allocate(items)

    return hotloop.Workload((ranker.gist, ranker.lens), ranker.optimizer, ranker.step, given(6), infer=infer)


def run(ranker, count=6):
    """Train and ask in turns; return the losses, and what the allocator kept at the first turn."""
    losses, kept = [], None
    for batch in given(count):
        losses.append(ranker.step(*batch).item())
        found = ranker.allocate(batch[0])
        kept = kept or found
    return losses, kept


def modes(model, name):
    return json.loads(json.dumps(hotloop.status(model).to_dict()))["components"][name]["modes"]


def test_counts_of_calls_shapes_and_reentry_are_told_for_training_and_inference():
    eager = run(Ranker())
    with cudagraph_emulation():
        ranker = Ranker()
        hotloop.compile(ranker.networks(), "reduce-overhead")
        losses, kept = run(ranker)
        found = modes(ranker.networks(), "gist")
    assert losses == eager[0]
    assert all(torch.equal(one, other) for one, other in zip(kept[1:], eager[1][1:], strict=True)), "still its values"
    training, inference = found["training"], found["inference"]
    assert (training["calls"], inference["calls"]) == (6, 18)
    assert training["calls_per_step"] == {"1": 6}, "each forward is followed by one step"
    assert list(training["shapes"]) == ["4x6x8"]
    assert list(inference["shapes"]) == ["1x6x8"]
    assert training["calls_in_backward"] == inference["calls_in_backward"] == 0


def test_a_call_within_a_backward_is_counted():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x).tanh()

    inner = Inner()
    with cudagraph_emulation():
        hotloop.compile(inner, "reduce-overhead")
        for _ in range(3):
            checkpoint(inner, torch.randn(4, 8, requires_grad=True), use_reentrant=True).sum().backward()
        found = modes(inner, "model")
    assert found["training"]["calls_in_backward"] + found["inference"]["calls_in_backward"] == 3


def test_one_helper_marks_the_step_and_copies_what_is_kept():
    with cudagraph_emulation() as emulation:
        model = torch.compile(Classifier(), backend=emulation.backend)
        ids = [torch.full((2, 4), number) for number in range(5)]
        with torch.no_grad():
            owned = [hotloop.own(model(one)) for one in ids]
            again = [model(one).clone() for one in ids]
            assert all(torch.equal(one, other) for one, other in zip(owned, again, strict=True))
    torch.compiler.reset()
    with cudagraph_emulation() as emulation, torch.no_grad():
        model = torch.compile(Classifier(), backend=emulation.backend)
        held = [model(one) for one in ids]
        with pytest.raises(StaleOutputError, match=r"hotloop\.own"):
            held[0].sum().item()


def test_the_harness_passes_a_safe_program_and_lists_what_it_holds():
    found = hotloop.harness(make)
    assert found.passed, str(found)
    assert "under the emulation of CUDA graphs, since there is no GPU" in str(found.verdict)
    held = [one for one in found.held if one.component == "model[0]"]
    assert held
    assert held[0].file.endswith("test_guide_stabilisation.py")
    assert "hotloop.own" in held[0].remedy


def test_the_command_harness_ends_as_its_verdict(capsys):
    assert command("harness", f"{__file__}:make") == 0
    assert "reduce-overhead" in capsys.readouterr().out


@pytest.mark.parametrize("asked", ["none", "aot_eager"])
def test_inference_has_a_switch_of_its_own(asked):
    ranker = Ranker()
    with hotloop.watch() as events:
        hotloop.compile(ranker.networks(), "aot_eager", inference=asked)
        ranker.allocate(given(1)[0][0])
    compiled = [one for one in events if one.kind == "compiled"]
    assert bool(compiled) == (asked == "aot_eager")
