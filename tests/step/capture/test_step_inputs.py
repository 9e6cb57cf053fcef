"""The static inputs of a captured step lie in memory as the batches do."""

import pytest
import torch
from torch import nn

import hotloop
from hotloop import events as ev
from hotloop._torch.places import unexpanded
from hotloop.step.capture import in_and_out

WIDE = torch.arange(60.0).reshape(3, 4, 5)
THIN = torch.arange(2.0**23).reshape(8, -1)[:, 0]
KEPT = {
    "plain": WIDE,
    "transposed": WIDE.transpose(0, 2),
    "a slice": WIDE[:, :, :-1],
    "a slice that begins later": WIDE[1:, :, 1:],
    "every second": WIDE[:, ::2],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": WIDE[:, :1].expand(3, 4, 5),
    "expanded in front": torch.arange(5).expand(3, 5),
    "expanded from one": torch.tensor(2.0).expand(3, 2),
    "a scalar": torch.tensor(2),
    "one of each": torch.zeros(1, 1),
    "empty": torch.empty(3, 0, 2),
}
COPIED = {"overlapping": torch.arange(6.0).unfold(0, 3, 1), "a column": THIN}


@pytest.mark.parametrize("name", [*KEPT, *COPIED])
def test_a_batch_is_copied_whole_with_its_own_strides_where_they_are_its_own(name):
    leaf = (KEPT | COPIED)[name]
    made = in_and_out.Inputs([leaf, 7], torch.device("cpu"))
    static, number = made.leaves
    assert number == 7
    assert static.shape == leaf.shape
    made.fill([leaf, 7])
    assert torch.equal(static, leaf)
    made.fill([leaf + 1, 7] if name in COPIED else [_like(leaf), 7])
    assert torch.equal(static, leaf + 1)
    assert (static.stride() == leaf.stride()) == (name in KEPT)
    assert static.untyped_storage().nbytes() <= 2 * max(8, leaf.nbytes)


def _like(leaf):
    """Give another batch with the same strides, as a loader does."""
    more = torch.as_strided(torch.zeros(leaf.untyped_storage().nbytes(), dtype=leaf.dtype), leaf.shape, leaf.stride())
    unexpanded(more).copy_(unexpanded(leaf) + 1)
    return more


def test_code_for_slices_is_not_compiled_anew_while_it_is_captured():
    """``tokens[:, :-1]`` and ``tokens[:, 1:]``: on a GPU a compile inside of a capture ends it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with hotloop.testing.captured_step_emulation(), hotloop.watch() as events:
        loop = hotloop.Loop(model, optimizer, run="aot_eager+graph", total_steps=100)

        @loop.step
        def step(x, y):
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(8):
            tokens = torch.randint(16, (4, 9))
            step(tokens[:, :-1], tokens[:, 1:])
        assert loop.status().tier == "aot_eager+graph"
        loop.close()
    assert sum(isinstance(one, ev.Compiled) for one in events) == 1
    assert not [one for one in events if isinstance(one, ev.Recompiled)]
