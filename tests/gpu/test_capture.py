"""Whole-step capture on a GPU: what the stand-in cannot show. The cases themselves are in tests/step, for both."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hotloop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Net(nn.Module):
    """No bias before the BatchNorm: its gradient would be all rounding, of which Adam makes whole steps."""

    def __init__(self, p=0.25):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(p), nn.Linear(64, 4)
        )

    def forward(self, x):
        return self.layers(x)


def train(run, steps, body=None, host=False, capturable=None, **optimizer_settings):
    """Train, and give losses, model and loop; ``body`` replaces the step's forward."""
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-8, **{"fused": True, **optimizer_settings})
    loop = hotloop.Loop(model, optimizer, run=run)

    @loop.step
    def step(x):
        x = x.cuda(non_blocking=True)
        loss = (body or (lambda model, x: model(x).square().mean()))(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 16, generator=generator)
        losses.append(step(x if host else x.cuda()))
    return [loss.item() for loss in losses], model, loop


def assert_as_eager(ours, theirs, rtol=1e-5):
    assert ours[0] == pytest.approx(theirs[0], rel=rtol)
    for a, b in zip(ours[1].state_dict().values(), theirs[1].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_a_captured_step_trains_as_eager_does_dropout_included(host, fused):
    ours, theirs = train("eager+graph", 40, host=host, fused=fused), train("eager", 40, host=host, fused=fused)
    assert ours[2].status().tier == "eager+graph"
    assert_as_eager(ours, theirs, 1e-5 if fused else 1e-4)


class Scaled:
    """A body with constants that it makes on the host, one of which changes."""

    def __init__(self):
        self.scale, self.to_one = 0.5, [1.0, 2.0, 3.0, 4.0]

    def __call__(self, model, x):
        where, out = x.device, model(x)
        out = torch.where(out > 0, out, torch.tensor(0.0, device=where, dtype=out.dtype))
        out = out * torch.as_tensor(self.to_one, device=where) + out.new_tensor([[0.5, 0.25, 0.0, 0.0]])
        distance = torch.arange(4)[:, None] - torch.arange(4)[None]
        out = out @ distance.abs().to(where).float() + torch.ones(4).cuda() * 0.5
        return (out * torch.tensor(self.scale, device=where)).square().mean()


@pytest.mark.parametrize("changes", [False, True])
def test_constants_that_are_copied_to_the_device_are_captured(changes):
    """Their copies wait for the device in eager; a recording keeps them. One that changes is recorded anew."""

    def run(tier):
        body = Scaled()

        def changing(model, x):
            return body(model, x)

        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-8, fused=True)
        loop = hotloop.Loop(model, optimizer, run=tier)

        @loop.step
        def step(x):
            loss = changing(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        draws, losses = torch.Generator().manual_seed(2), []
        for number in range(60):
            if changes and number == 30:
                body.scale = 0.75
            losses.append(step(torch.randn(32, 16, generator=draws).cuda()))
        return [loss.item() for loss in losses], model, loop

    ours, theirs = run("eager+graph"), run("eager")
    assert ours[2].status().tier == "eager+graph", ours[2].status()
    assert_as_eager(ours, theirs)


def test_t5_is_captured():
    """Its attention is not fused: transformers' mask copies a number to the device in every step."""
    transformers = pytest.importorskip("transformers")

    def run(tier):
        torch.manual_seed(0)
        settings = {"vocab_size": 100, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(**settings, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config).cuda().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        loop = hotloop.Loop(model, optimizer, run=tier)

        @loop.step
        def step(input_ids, attention_mask, labels):
            loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        draws, losses = torch.Generator("cuda").manual_seed(2), []
        for _ in range(30):
            texts = torch.randint(3, 100, (4, 12), generator=draws, device="cuda")
            losses.append(step(texts, torch.ones_like(texts), texts[:, :6].clone()))
        return [loss.item() for loss in losses], model, loop

    ours, theirs = run("eager+graph"), run("eager")
    assert ours[2].status().tier == "eager+graph", ours[2].status()
    assert_as_eager(ours, theirs, 1e-4)


def test_the_random_stream_ends_where_eagers_does():
    train("eager+graph", 30)
    captured = torch.cuda.get_rng_state()
    train("eager", 30)
    assert torch.equal(captured, torch.cuda.get_rng_state())


@pytest.mark.parametrize("besides", [False, True])
def test_dropout_between_the_layers_of_an_lstm_is_captured_and_its_state_ends_where_eagers_does(besides):
    """cuDNN draws from a state that torch keeps for the device and makes anew once the generator has been seeded."""

    def run(tier):
        torch.manual_seed(0)
        body, head = nn.LSTM(8, 16, num_layers=2, dropout=0.5, batch_first=True).cuda(), nn.Linear(16, 4).cuda()
        optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=2**-8, fused=True)
        loop = hotloop.Loop([body, head], optimizer, run=tier)

        @loop.step
        def step(x):
            last = body(x)[0][:, -1]
            loss = head(nn.functional.dropout(last, 0.3) if besides else last).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        draws = torch.Generator().manual_seed(2)
        losses = [step(torch.randn(32, 6, 8, generator=draws).cuda()) for _ in range(30)]
        with torch.no_grad():  # it drops what the state says next
            after = body(torch.ones(64, 6, 8, device="cuda"))[0]
        return [loss.item() for loss in losses], loop, after, torch.cuda.get_rng_state()

    theirs, _, expected, stream = run("eager")
    ours, loop, after, our_stream = run("eager+graph")
    assert loop.status().tier == "eager+graph", loop.status()
    torch.testing.assert_close(after, expected)
    assert torch.equal(our_stream, stream)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_recording_keeps_the_state_of_an_rnns_dropout_that_it_writes_into():
    """Seeding makes torch give the device another state; a replay must not write into memory that others have by then."""
    torch.manual_seed(0)
    body, head = nn.LSTM(8, 16, num_layers=2, dropout=0.5, batch_first=True).cuda(), nn.Linear(16, 4).cuda()
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
    loop = hotloop.Loop([body, head], optimizer, run="eager+graph")

    @loop.step
    def step(x):
        loss = head(body(x)[0][:, -1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(32, 6, 8, device="cuda")
    for _ in range(12):
        step(x)
    assert loop.status().tier == "eager+graph", loop.status()
    torch.manual_seed(1)
    other = nn.LSTM(8, 16, num_layers=2, dropout=0.5).cuda()
    other(torch.ones(3, 2, 8, device="cuda"))  # from here on torch holds another state
    zeros = [torch.zeros(2**20, dtype=torch.uint8, device="cuda") for _ in range(64)]
    for _ in range(5):
        step(x)
    torch.cuda.synchronize()
    assert not any(one.any() for one in zeros)


def test_a_capture_that_fails_half_way_leaves_torch_right():
    def synchronises(model, x):
        loss = model(x).square().mean()
        torch.cuda.synchronize()  # no operation, so no survey sees it
        return loss

    ours, theirs = train("eager+graph", 30, synchronises), train("eager", 30, synchronises)
    status = ours[2].status()
    assert status.tier == "eager"
    assert next(tier for tier in status.tiers if tier.name == "eager+graph").state == "declined"
    assert_as_eager(ours, theirs, 1e-6)
    # A second program in the same process is captured as if nothing had happened.
    again = train("eager+graph", 30)
    assert again[2].status().tier == "eager+graph"


def test_a_failed_capture_gives_its_memory_back():
    def synchronises(model, x):
        loss = model(x).square().mean()
        torch.cuda.synchronize()
        return loss

    train("eager+graph", 8, synchronises)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        train("eager+graph", 8, synchronises)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**21


def test_an_optimizer_outside_the_graph():
    torch.manual_seed(0)
    pairs = []
    for run in ("eager+graph", "eager"):
        torch.manual_seed(0)
        model = Net(p=0.0).cuda()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=2**-6)
        loop = hotloop.Loop(model, optimizer, run=run)

        @loop.step
        def step(x, model=model, optimizer=optimizer):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        generator = torch.Generator("cuda").manual_seed(3)
        pairs.append(
            ([step(torch.randn(32, 16, device="cuda", generator=generator)).item() for _ in range(24)], model, loop)
        )
    assert pairs[0][2].status().tier == "eager+graph"
    assert_as_eager(*pairs)


@pytest.mark.parametrize("run", ["full", "full+graph", "regional+graph"])
def test_compiled_tiers_are_proven_and_train(run):
    ours, theirs = train(run, 40), train("eager", 40)
    assert ours[2].status().tier == run
    assert_as_eager(ours, theirs, 1e-2)


@pytest.mark.parametrize("run", ["reduce-overhead", "triton"])
def test_presets_with_graphs_of_their_own_may_be_held(run):
    torch.manual_seed(0)
    model = Net(p=0.0).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    loop = hotloop.Loop(model, optimizer, run=run)

    @loop.step
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    held = [step(torch.randn(32, 16, device="cuda")) for _ in range(12)]
    assert len({loss.item() for loss in held}) == 12


def test_auto_captures_a_launch_bound_step():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(60))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x)) + x
            return x

    model = Deep().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loop = hotloop.Loop(model, optimizer, total_steps=20_000)

    @loop.step
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(400):
        step(torch.randn(16, 32, device="cuda"))
    assert loop.status().tier.endswith("+graph")
    loop.close()


def small_program(run, *, hold=False, batch=None, scale=None, **settings):
    """Train for 30 steps; gives what was held, the model and the loop."""
    torch.manual_seed(0)
    model = Net(p=0.0).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 2**-8, "fused": True, **settings})
    held = [model(torch.ones(4, 16, device="cuda")).sum()] if hold else []  # its graph keeps the accumulators alive
    loop = hotloop.Loop(model, optimizer, run=run)

    @loop.step
    def step(x):
        loss = model(x.cuda(non_blocking=True)).square().mean()
        if scale is not None:
            loss = loss * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    generator = torch.Generator().manual_seed(3)
    for number in range(30):
        x = torch.randn(32, 16, generator=generator)
        held.append(step(x if batch is None else batch.copy_(x)))
        if isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
            optimizer.param_groups[0]["lr"].fill_(2**-8 / (number + 1))
    return [one.item() for one in held], model, loop


def test_a_loss_that_is_held_from_before_the_first_step_does_not_keep_it_from_being_captured():
    ours, theirs = small_program("eager+graph", hold=True), small_program("eager", hold=True)
    overridden = hasattr(torch.autograd.graph, "set_override_stale_capture_stream")
    assert ours[2].status().tier == ("eager+graph" if overridden else "eager")
    assert_as_eager(ours, theirs)


def test_a_pinned_buffer_may_be_filled_again_at_once():
    batch = torch.empty(32, 16).pin_memory()
    ours, theirs = small_program("eager+graph", batch=batch), small_program("eager")
    assert ours[2].status().tier == "eager+graph"
    assert_as_eager(ours, theirs)


def test_a_scalar_on_the_host_is_told_and_not_frozen():
    ours, theirs = (
        small_program("eager+graph", scale=torch.tensor(0.5)),
        small_program("eager", scale=torch.tensor(0.5)),
    )
    declined = next(tier for tier in ours[2].status().tiers if tier.name == "eager+graph")
    assert declined.state == "declined"
    assert "on the host" in declined.why
    assert_as_eager(ours, theirs)


def test_a_rate_that_is_a_tensor_on_the_host_stays_live():
    ours = small_program("eager+graph", lr=torch.tensor(2**-8))
    theirs = small_program("eager", lr=torch.tensor(2**-8))
    assert ours[2].status().tier == "eager+graph"
    assert_as_eager(ours, theirs)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_bias_that_began_at_zero_is_no_reason_to_decline(kind):
    """A Swin was: the recording rounds beta2 otherwise, which is past 16 ulp of what one of three updates made."""
    torch.manual_seed(0)
    model = nn.Linear(1, 64, device="cuda")
    nn.init.zeros_(model.bias)
    optimizer = kind(model.parameters(), lr=1e-4, foreach=True)
    loop = hotloop.Loop(model, optimizer, run="eager+graph")

    @loop.step
    def step(toward):
        (model(toward.new_ones(1)) * toward).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(12):
        step(torch.randn(64, device="cuda") * 2.0**number)  # the newest gradient outweighs those before
    assert loop.status().tier == "eager+graph", loop.status()
    loop.close()


def test_a_loop_is_captured_after_all_recordings_of_another_were_dropped():
    """A pool ends with the last graph in it, and nothing may be captured into it again."""
    _, model, loop = small_program("eager+graph")
    loop.transitions.forget_recordings()
    del model
    assert loop.status().tier == "eager+graph"
    torch.cuda.empty_cache()
    assert small_program("eager+graph")[2].status().tier == "eager+graph"


def test_a_checkpointed_backward_in_torchs_own_thread_is_captured():
    def checkpointed(model, x):
        return checkpoint(model.layers[:3], x, use_reentrant=False).square().mean()

    ours, theirs = train("eager+graph", 30, checkpointed), train("eager", 30, checkpointed)
    assert ours[2].status().tier == "eager+graph"
    assert_as_eager(ours, theirs)
