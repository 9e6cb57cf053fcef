"""Attention whose dropout a fused kernel draws, as on a GPU: in float64 the same weights are dropped.

No kernel of a CPU drops inside; so the one of these tests is an operation of theirs, with the arguments of torch's. It
draws in an order of its own, and as torch's it is there for float32 only: in float64 softmax and dropout are apart.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from verify_programs import batches, workload, wrong

import hotloop
from hotloop._torch.attention import drops_inside
from hotloop._torch.upcast import NotRepeatableError, recording_draws
from hotloop.step.prove import proof
from hotloop.step.prove.reference_runs import StepOutputs
from hotloop.step.prove.wide_reference import wide_step
from hotloop.step.state.holdings import Holdings
from hotloop.step.state.program import Program

ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool _log_sumexp, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor)"
)
DRAWN = (torch.Tag.nondeterministic_seeded,)
_library = torch.library.Library("hotloop_attention", "DEF")


def _kernel(name, order):
    """Define fused attention whose mask is drawn by ``order`` from queries and keys; it returns output and mask."""
    _library.define(name + ARGUMENTS, tags=DRAWN)

    def fused(query, key, value, attn_bias, _log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):  # noqa: PLR0917
        assert query.dtype == torch.float32, "no kernel for double"
        mask = order(query, key) > dropout_p
        return weights(query, key, attn_bias, is_causal, scale) * mask / (1 - dropout_p) @ value, mask

    def saved(ctx, inputs, keyword_only_inputs, output):
        ctx.save_for_backward(*inputs[:4], output[1])
        ctx.rest = *inputs[5:], keyword_only_inputs["scale"]

    def backward(ctx, gradient, _):
        query, key, value, bias, mask = ctx.saved_tensors
        share, is_causal, scale = ctx.rest
        with torch.enable_grad():
            given = [one.detach().requires_grad_() for one in (query, key, value)]
            made = weights(given[0], given[1], bias, is_causal, scale) * mask / (1 - share) @ given[2]
        return *torch.autograd.grad(made, given, gradient), None, None, None, None

    full = f"hotloop_attention::{name}"
    _library.impl(name, fused, "CPU")
    torch.library.register_fake(
        full,
        lambda q, k, v, *_, **__: (q.new_empty(q.shape), q.new_empty((*q.shape[:-1], k.shape[-2]), dtype=torch.bool)),
        lib=_library,
    )
    torch.library.register_autograd(full, backward, setup_context=saved, lib=_library)
    return getattr(torch.ops.hotloop_attention, name).default


def weights(query, key, bias, is_causal, scale=None):
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = scores if bias is None else scores + bias
    return (scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf) if is_causal else scores).softmax(-1)


def by_place(query, key):
    """Draw as torch's kernels do: a number belongs to a place."""
    return torch.rand(key.shape[-2], *query.shape[:-1]).movedim(0, -1)


def by_value(query, key):
    """Draw as no kernel of torch's does: the dropped places depend on the numbers."""
    drawn = torch.rand(*query.shape[:-1], key.shape[-2])
    return drawn.flip(-1) if query.any() else drawn


FUSED, HIDDEN = _kernel("by_place", by_place), _kernel("by_value", by_value)


class Attention(nn.Module):
    """Two heads of width 4 over 6 places: a mask takes two calls."""

    def __init__(self, kernel=FUSED, *, share=0.3, causal=False, bias=False):
        super().__init__()
        self.into, self.act, self.out = nn.Linear(16, 6 * 24), nn.GELU(), nn.Linear(48, 5)
        self.kernel, self.share, self.causal = kernel, share, causal
        self.register_buffer("bias", torch.linspace(-1, 1, 36).view(1, 1, 6, 6) if bias else None)

    def forward(self, x):
        query, key, value = self.act(self.into(x)).view(-1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(query, key, value).transpose(1, 2).flatten(1))

    @torch.compiler.disable  # the planted compiler of these tests would run its forward in the backward again
    def attend(self, query, key, value):
        if query.dtype == torch.float64:
            return torch.native_dropout(weights(query, key, self.bias, self.causal), self.share, True)[0] @ value
        return self.kernel(query, key, value, self.bias, True, self.share, self.causal)[0]


def wide_and_eager(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).pow(2).mean() + torch.rand(()) * 0  # a draw that comes after
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    program = Program(step, Holdings({"model": model}, {"optimizer": optimizer}), torch.device("cpu"), lambda: False)
    x, draws = torch.randn(8, 16), []

    def noted():
        with recording_draws(draws):
            return proof.plain_run(program.holdings, lambda: step(x))

    plain = StepOutputs.of(program, lambda: proof.plain_run(program.holdings, lambda: step(x)))
    eager = StepOutputs.of(program, noted)
    for name, one in plain.ours.items():
        assert one is None or torch.equal(one, eager.ours[name]), "a step that is noted is the step"
    return wide_step(program, ((x,), {}), torch.float64, draws), eager


@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"bias": True}, {"share": 0.02}], ids=str)
def test_in_float64_the_same_weights_are_dropped(settings):
    torch.manual_seed(0)
    wide, eager = wide_and_eager(Attention(**settings))
    gradients = [name for name, one in wide.items() if name.startswith("gradient") and one is not None]
    assert gradients
    for name in gradients:
        apart = (eager.ours[name].double() - wide[name]).norm() / wide[name].norm()
        assert 1e-10 < apart < 1e-5, name


def test_a_kernel_that_drops_by_more_than_places_is_found_out():
    torch.manual_seed(0)
    with pytest.raises(NotRepeatableError, match="by_value cannot be repeated: its mask does not show"):
        wide_and_eager(Attention(HIDDEN))


@pytest.mark.parametrize("factor", [1.0, 1.00001])
def test_verify_has_a_reference_in_float64_and_its_limits(factor):
    with wrong("aten.gelu_backward", factor) as planted:
        verdict = hotloop.verify(workload(Attention()), "aot_eager", search=False)
    assert planted
    assert verdict.passes == (factor == 1), verdict
    assert verdict.reference == "float64", verdict.reference_why


def test_verify_says_what_it_has_no_reference_for():
    verdict = hotloop.verify(workload(Attention(HIDDEN)), "aot_eager", steps=1)
    assert verdict.reference == "eager"
    assert "does not show from outside" in verdict.reference_why


@pytest.mark.campaign
def test_batches_of_another_size_have_masks_of_theirs():
    data = [*batches(3), *batches(3, size=7)]
    verdict = hotloop.verify(workload(Attention(), data=data), "aot_eager", steps=4)
    assert verdict.passes, verdict
    assert verdict.reference == "float64", verdict.reference_why


def test_torchs_own_kernels_are_known_by_their_arguments():
    """No other kernel is taken for one that shows its mask."""
    ops = torch.ops.aten
    for kernel in ("flash", "efficient", "cudnn"):
        assert drops_inside(getattr(ops, f"_scaled_dot_product_{kernel}_attention").default)
    assert not drops_inside(ops.native_dropout.default)
    for kernel in ("efficient", "cudnn"):
        assert not drops_inside(getattr(ops, f"_scaled_dot_product_{kernel}_attention_backward").default)
