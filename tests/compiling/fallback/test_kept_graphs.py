"""A compiled backward may write over what its forward saved, to save memory; yet a graph can be kept, as in eager."""

import copy

import pytest
import torch
from compiling_models import rows
from torch import nn

import hotloop
from hotloop._torch.autograd import compiled_nodes

pytestmark = pytest.mark.inductor


class Lone(nn.Module):
    """Its backward computes in the memory of what was saved for the sine's: nothing else has the right size."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        """Give a loss."""
        return torch.sin(self.inner(x)).sum()


class Shown(Lone):
    """Has the backward of a `Lone`, and hands out what that one may write over."""

    def forward(self, x):
        """Give a loss, and what it is of."""
        inner = self.inner(x)
        return torch.sin(inner).sum(), inner.detach()


class Waves(nn.Module):
    """Gives two losses, whose backwards share what one forward has saved."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        """Give two losses that share a forward."""
        waves = torch.sin(self.inner(x))
        return waves.sum(), self.outer(waves).square().sum()


class Strided(nn.Module):
    """Saves halves of one tensor, and one that is expanded: their strides leave gaps, and overlap."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x):
        """Give two losses that share a forward."""
        one, other = torch.sin(self.inner(x)).chunk(2, -1)
        mean = self.inner(x.mean(0, keepdim=True)).sin().expand(3, 8)
        return (one * other).sum(), self.outer(one * other).square().sum() + (mean @ self.outer.weight).cos().sum()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder of its own for Inductor's compiled code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def twice(model, x):
    loss = model(x) if isinstance(model, Lone) else sum(model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model, x):
    first, second = model(x)
    first.backward(retain_graph=True)
    second.backward()


def between_others(model, x):
    one, other = sum(model(x)), sum(model(2 * x))
    one.backward(retain_graph=True)
    other.backward(retain_graph=True)
    torch.autograd.grad(one, [model.inner.weight], retain_graph=True)
    one.backward()
    other.backward()


WAYS = [twice, two_losses, between_others, twice]


def assert_trains_as(model, reference, way):
    for one in (model, reference):
        one.zero_grad()
        way(one, rows())
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "ways"), [(Lone, [twice]), (Waves, WAYS), (Strided, WAYS)])
def test_a_kept_graph_is_gone_through_as_in_eager(kind, ways, cache):
    reference = kind()
    model = hotloop.compile(copy.deepcopy(reference), "default")
    for way in ways:
        assert_trains_as(model, reference, way)


@pytest.mark.campaign
def test_a_backward_may_write_over_what_was_saved_for_it(cache):
    model = hotloop.compile(Lone(), "default")
    (node,) = compiled_nodes(model(rows()))
    assert node._forward_cls.metadata.bw_donated_idxs


@pytest.mark.parametrize("compiled_before", ["by hotloop", "by torch", "both by torch"])
def test_a_backward_from_the_cache_writes_over_nothing_that_its_forward_hands_out(compiled_before, cache):
    by = torch.compile if "torch" in compiled_before else hotloop.compile
    reference = Shown()
    for kind in (Lone, Shown) if "both" in compiled_before else (Lone,):
        outputs = by(kind())(rows())
        (outputs if kind is Lone else outputs[0]).backward()
        torch.compiler.reset()
    loss, shown = hotloop.compile(copy.deepcopy(reference), "default")(rows())
    loss.backward()
    torch.testing.assert_close(shown, reference(rows())[1])
