"""Checkpointed blocks that draw random numbers, captured on a GPU: equal to eager bit for bit, as is what comes after.

Learning rates are powers of two, which float32 holds as they are: a recorded optimizer reads them so.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hotloop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Block(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.one, self.two, self.share = nn.Linear(64, 64), nn.Linear(64, 64), share

    def forward(self, x):
        hidden = F.gelu(self.one(x))
        if self.share:
            hidden = F.dropout(hidden, self.share)
        hidden = self.two(hidden)
        return x + (F.dropout(hidden, 0.2) if self.share else hidden)


class Net(nn.Module):
    """Blocks with several draws or none, checkpointed one by one, or all in another checkpoint."""

    def __init__(self, way="plain"):
        super().__init__()
        self.way, self.head = way, nn.Linear(64, 8)
        self.blocks = nn.ModuleList([Block(0.3), Block(0.0), Block(0.1), Block(0.3)])

    def forward(self, x):
        if self.way == "nested":
            return self.head(F.dropout(checkpoint(self.all, x, use_reentrant=False), 0.1))
        if self.way == "forked":
            with torch.random.fork_rng(devices=[0]):
                x = x + F.dropout(x, 0.5)
        return self.head(self.all(x))

    def all(self, x):
        for block in self.blocks:
            x = checkpoint(block, F.dropout(x, 0.1), use_reentrant=self.way == "reentrant")
        return x


def batch(index, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(index)).cuda()


def plain(model, optimizer):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def run(asked, make, *, kind=plain, steps=24, between=lambda *_: None, arguments=None):
    """Train; ``arguments(index)`` are those of a step."""
    arguments = arguments or (lambda index: (batch(index, 32, 64), torch.arange(32, device="cuda") % 8))
    torch.manual_seed(0)
    model = make().cuda()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2**-8, fused=True)
    with hotloop.Loop(model, optimizer, run=asked) as loop:
        step = loop.step(kind(model, optimizer))
        torch.manual_seed(1)
        losses = []
        for index in range(steps):
            between(index, model, optimizer)
            losses.append(step(*arguments(index)))
        after = torch.rand(16, device="cuda")
        held = [parameter.detach().clone() for parameter in model.parameters()]
        return torch.stack(losses), held, after, loop.status()


def assert_equal(asked, make, **more):
    """The run is captured, and ends bit for bit as eager's: losses, parameters, and the random numbers drawn next."""
    ours, theirs = run(asked, make, **more), run("eager", make, **more)
    assert ours[3].tier == asked, ours[3]
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)
    for one, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert torch.equal(ours[2], theirs[2])
    return ours[3]


@pytest.mark.parametrize("way", ["plain", "reentrant", "nested", "forked"])
def test_blocks_that_draw_are_eagers(way):
    assert_equal("eager+graph", lambda: Net(way))


def test_a_seed_a_checkpoint_and_draws_between_two_steps():
    def between(index, model, optimizer):
        if index == 12:
            torch.manual_seed(5)
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if index in (5, 15):
            torch.rand(3, device="cuda")

    assert_equal("eager+graph", Net, between=between, steps=30)


def accumulating(model, optimizer):
    def step(x, y, steps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if steps:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def test_gradients_accumulated_over_two_calls():
    def arguments(index):
        return batch(index, 32, 64), torch.arange(32, device="cuda") % 8, index % 2 == 1

    assert_equal("eager+graph", Net, kind=accumulating, arguments=arguments, steps=40)


class Noisy(torch.optim.SGD):
    """An optimizer that reads a value on the host, so that it runs beside the recording; it draws as well."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and float(one.grad.abs().max()) > 0:
                    one.add_(torch.randn_like(one), alpha=2.0**-12)
        return super().step(closure)


def test_draws_go_on_where_an_optimizer_outside_of_the_recording_has_drawn():
    def trained(asked):
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = Noisy(model.parameters(), lr=2**-6)
        with hotloop.Loop(model, optimizer, run=asked) as loop:
            step = loop.step(plain(model, optimizer))
            losses = [step(batch(i, 32, 64), torch.arange(32, device="cuda") % 8) for i in range(24)]
            return torch.stack(losses), loop.status()

    ours, theirs = trained("eager+graph"), trained("eager")
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)  # captured or declined, it is eager's


def llama(reentrant):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=names)
    return peft.get_peft_model(model, adapter).train()


def tuning(model, optimizer):
    trained = [one for one in model.parameters() if one.requires_grad]

    def step(tokens):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def tokens(index):
    return (torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(index)).cuda(),)


@pytest.mark.parametrize("reentrant", [False, True])
def test_lora_of_a_llama_under_gradient_checkpointing(reentrant):
    assert_equal("eager+graph", lambda: llama(reentrant), kind=tuning, arguments=tokens, steps=20)


@pytest.mark.xfail(
    reason="with Inductor the capture fails, and the step is declined: its random numbers are not served"
)
def test_compiled_blocks_in_checkpointed_regions():
    """Inductor rounds otherwise than eager: the recording is held against the same code without a graph."""
    graph = run("regional+graph", lambda: llama(False), kind=tuning, arguments=tokens, steps=30)
    assert graph[3].tier == "regional+graph", graph[3]
    code = run("regional", lambda: llama(False), kind=tuning, arguments=tokens, steps=30)
    eager = run("eager", lambda: llama(False), kind=tuning, arguments=tokens, steps=30)
    torch.testing.assert_close(graph[0], code[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(graph[0], eager[0], rtol=1e-2, atol=1e-2)
    assert torch.equal(graph[2], eager[2])


def test_other_devices_states_are_left_alone_in_a_capture():
    """``fork_rng()`` without devices keeps the states of all GPUs."""

    def kind(model, optimizer):
        inner = plain(model, optimizer)

        def step(x, y):
            with torch.random.fork_rng(), contextlib.nullcontext():
                x = F.dropout(x, 0.5)
            return inner(x, y)

        return step

    assert_equal("eager+graph", Net, kind=kind)
