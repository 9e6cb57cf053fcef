"""Blocks that are captured one by one in a step that cannot be captured whole."""

import logging
import random

import pytest
import torch
from step_programs import batches
from step_sentinels import checked_every
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import events as ev
from hotloop.errors import ConfigError
from hotloop.step.capture.block_recording import BlockRecording

PIECES = "pieces"
RAN = []
note = RAN.append  # a bound method of a list: what it appends to is no state that the step could read


class Block(nn.Module):
    def __init__(self, width=8, dropout=0.25, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.inner, self.outer = norm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout, self.scale = nn.Dropout(dropout), 1.0

    def forward(self, x):
        note(None)
        return x + self.scale * self.dropout(self.outer(F.gelu(self.inner(self.norm(x)))))


class Net(nn.Module):
    """Layer drop between blocks, as transformers' speech models have it."""

    def __init__(self, blocks=4, drop=0.3, **settings):
        super().__init__()
        self.blocks, self.head, self.drop = (
            nn.ModuleList(Block(**settings) for _ in range(blocks)),
            nn.Linear(8, 4),
            drop,
        )

    def forward(self, x):
        x = x * 1.0
        for block in self.blocks:
            if self.drop and torch.rand([]) < self.drop:
                continue
            x = block(x)
        return self.head(x)


def training(make=Net, steps=24, before=None, body=lambda model, x: model(x), backward=None, **settings):
    """A program that reads its loss on the host: no recording can hold the whole step."""

    def program(run):
        RAN.clear()
        model = make().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True)

        @run.loop(model, optimizer, **settings).step
        def train_step(x, y):
            made = body(model, x)
            loss = F.cross_entropy(made, y)
            (backward or torch.Tensor.backward)(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item(), made.detach()

        for number, (x, y) in enumerate(batches(run.device, steps)):
            if before is not None:
                before(number, model)
            loss, made = train_step(x, y)
            run.note(torch.tensor(loss), made)
        program.ran = len(RAN)
        return model, optimizer

    return program


def captured(both, program, *, most, exact=True):
    """Run a program eagerly and in pieces; it must end the same, with so few runs of the blocks' Python."""
    run = both.alike(program, asked=PIECES, exact=exact)
    assert not run.declined, run.declined
    assert run.status().tier == PIECES
    assert PIECES in [one.tier for one in run.told(ev.TierProven)]
    assert program.ran <= most, program.ran
    return run


def without_drop(**settings):
    return lambda: Net(drop=0.0, **settings)


PROVING = 4 * (2 + 1 + 3 * 2 + 1)
"""How often four blocks run: eagerly, audited, recorded, and in each of three proofs rehearsed and as the reference."""


def test_a_step_with_layer_drop_trains_as_eager_does_with_its_blocks_captured(both):
    captured(both, training(lambda: Net(drop=0.1), steps=40), most=100)  # eager: some 145


def test_the_loss_may_be_read_in_the_step(both):
    captured(both, training(without_drop()), most=PROVING)


def test_buffers_of_blocks_are_as_in_eager(both):
    captured(both, training(without_drop(norm=nn.BatchNorm1d, dropout=0.0)), most=PROVING)


def test_under_autocast(both):
    def body(model, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return model(x).float()

    run = both.alike(training(without_drop(dropout=0.0), body=body), asked=PIECES)
    assert not run.declined
    assert run.status().tier == PIECES


def test_a_block_that_runs_twice_before_its_backward_runs_eagerly_the_second_time(both):
    def body(model, x):
        for block in (*model.blocks, *model.blocks):
            x = block(x)
        return model.head(x)

    program = training(without_drop(), body=body)
    captured(both, program, most=24 * 4 + 2 * PROVING)
    assert program.ran > 24 * 4


def test_gradients_that_accumulate_over_two_backwards_are_eagers(both):
    def program(run):
        RAN.clear()
        model = Net(drop=0.0).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-5)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            losses = []
            for part, label in zip(x.split(3), y.split(3), strict=True):
                loss = F.cross_entropy(model(part), label)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            return sum(losses)

        for x, y in batches(run.device, 24):
            run.note(torch.tensor(train_step(x, y)))
        program.ran = len(RAN)
        return model, optimizer

    captured(both, program, most=2 * PROVING)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.blocks[1], "scale", 0.5),
        lambda model: model.blocks[1].inner.weight.requires_grad_(False),
        lambda model: model.blocks[1].inner.register_forward_hook(lambda _module, _args, made: made * 2),
        lambda model: model.blocks[1].dropout.eval(),
        lambda model: setattr(model.blocks[1].inner, "weight", nn.Parameter(model.blocks[0].inner.weight.detach() * 2)),
    ],
    ids=["an attribute", "frozen", "a hook", "a mode", "another parameter"],
)
def test_what_changes_between_steps_counts_in_the_next_one(both, change):
    program = training(without_drop(), 40, before=lambda number, model: change(model) if number == 14 else None)
    captured(both, program, most=90)  # eager: 160


def test_what_changes_in_each_step_is_declined(both):
    program = training(without_drop(), before=lambda number, model: setattr(model.blocks[1], "scale", 1 / (1 + number)))
    run = both.alike(program, asked=PIECES, exact=True)
    assert run.declined
    assert run.status().tier == "eager"


def test_what_the_step_changes_between_two_blocks_counts_at_once(both):
    """By a value on the host: at step 14 for the first time, after everything was proven."""
    limit = torch.zeros(())

    def body(model, x):
        model.blocks[1].scale = 0.5 if limit.item() >= 14 else 1.0
        return model(x)

    program = training(without_drop(), 40, before=lambda number, _: limit.fill_(number), body=body)
    captured(both, program, most=90)  # eager: 160


def test_a_call_that_is_recorded_later_has_the_tier_proven_again(both):
    """Of other shapes, say: nothing has compared it."""
    wide = torch.zeros(())

    def body(model, x):
        return model(torch.cat([x, x]) if wide.item() > 0.5 else x)[: len(x)]

    program = training(without_drop(dropout=0.0), 40, before=lambda number, _: wide.fill_(number > 14), body=body)
    run = captured(both, program, most=3 * PROVING)
    assert len(run.told(ev.TierProven)) > 1


def test_a_block_that_the_audit_did_not_see_runs_as_written(both):
    """Layer drop has left it out: what it reads in Python is not watched."""
    skips = torch.ones(())

    def body(model, x):
        for block in model.blocks if skips.item() < 0.5 else model.blocks[:2]:
            x = block(x)
        return model.head(x)

    def before(number, model):
        skips.fill_(number < 14)
        model.blocks[3].scale = 0.5 if number == 30 else 1.0

    captured(both, training(without_drop(), 40, before=before, body=body), most=130)


class Reading(Block):
    def forward(self, x):
        return super().forward(x) if x.sum().item() < 1e9 else x


OUTSIDE = torch.ones(8)


class Global(Block):
    def forward(self, x):
        return super().forward(x) * OUTSIDE.to(x.device)


class Mutating(Block):
    def forward(self, x):
        made = super().forward(x.clone())
        return x.mul_(0.5) + made


class Drawing(Block):
    def forward(self, x):
        return super().forward(x) * (1 + random.random())


@pytest.mark.parametrize("kind", [Reading, Mutating])
def test_a_block_that_no_recording_can_repeat_stays_eager_and_the_others_do_not(both, kind):
    def make():
        model = Net(drop=0.0, dropout=0.0)
        model.blocks.extend([kind(dropout=0.0), kind(dropout=0.0)])
        return model

    program = training(make)
    captured(both, program, most=24 * 2 + 2 * PROVING)
    assert program.ran > 24 * 2


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Reading, "read on the host"), (Mutating, "not its own"), (Global, "no argument"), (Drawing, "Python's random")],
)
def test_where_no_block_can_be_recorded_the_tier_is_declined_for_it(both, kind, why):
    def make():
        model = Net(blocks=0, drop=0.0)
        model.blocks.extend([kind(), kind()])
        return model

    run = both.alike(training(make), asked=PIECES, exact=True)
    assert why in run.declined[0].reason
    assert run.status().tier == "eager"


def test_a_second_backward_through_one_call_is_undone_and_run_eagerly(both):
    twice = []

    def backward(loss):
        loss.backward(retain_graph=bool(twice))
        if twice:
            loss.backward()

    def before(number, _):
        twice[:] = [True] if number >= 14 else []

    run = both.alike(training(without_drop(), backward=backward, before=before), asked=PIECES, exact=True)
    assert "a second time" in run.declined[0].reason
    assert run.status().tier == "eager"


class Caching(Block):
    def forward(self, x, cache):
        return super().forward(x)


def test_blocks_that_take_objects_run_as_written_and_that_is_said(both):
    def make():
        model = Net(blocks=0, drop=0.0)
        model.blocks.extend([Block(), Caching(), Block(), Caching()])
        return model

    def body(model, x):
        for block in model.blocks:
            x = block(x, object()) if isinstance(block, Caching) else block(x)
        return model.head(x)

    program = training(make, body=body)
    run = captured(both, program, most=24 * 2 + PROVING)
    assert program.ran > 24 * 2
    said = [one for one in run.status().decisions if "blocks are captured" in one]
    assert len(said) == 1
    assert "2 of 4 blocks are captured; others run as written: it takes an argument of type object" in said[0]


class Several(Block):
    """Takes a mask by name; returns a tuple, with whole numbers, None, and a number."""

    def forward(self, x, *, mask=None, flag=True):
        x = super().forward(x if mask is None else x * mask)
        return x, x.argmax(-1), None, 2.0 if flag else 1.0


def test_results_of_several_kinds_and_named_arguments(both):
    def make():
        model = Net(blocks=0, drop=0.0)
        model.blocks.extend([Several(), Several()])
        return model

    def body(model, x):
        kept = []
        for block in model.blocks:
            x, best, nothing, factor = block(x, mask=(x > -1).float(), flag=True)
            kept.append(best)
            assert nothing is None
            x = x * factor
        return model.head(x) + torch.stack(kept).sum() / 1e3

    captured(both, training(make, body=body), most=PROVING)


def test_a_replay_that_goes_wrong_later_is_found_by_the_sentinel(both, monkeypatch):
    real, replays = BlockRecording.forward, []

    def wrong(recording, given):
        replays.append(None)
        made = real(recording, given)
        return [one * 1.5 for one in made] if len(replays) > 60 else made

    monkeypatch.setattr(BlockRecording, "forward", wrong)
    with checked_every(4):
        run, _ = both.run(training(without_drop(dropout=0.0), steps=60), PIECES)
    assert run.told(ev.SentinelDisagreed)
    assert run.status().tier == "eager"


def test_closing_the_loop_lets_go_of_what_was_recorded(both):
    model = Net(drop=0.0).to(both.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5)
    loop = hotloop.Loop(model, optimizer, run=PIECES)

    @loop.step
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for x, y in batches(both.device, 12):
        train_step(x, y)
    pieces = loop._runners[0].pieces
    assert pieces.recordings == 4
    loop.close()
    assert pieces.recordings == 0
    assert not any("_compiled_call_impl" in vars(part) for part in model.modules())


def test_a_model_without_repeated_blocks_runs_as_given_and_says_so(both, caplog):
    model = nn.Linear(2, 2).to(both.device)
    with caplog.at_level(logging.WARNING, "hotloop"):
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters()), run=PIECES)
    assert loop.tier.name == "eager"
    assert "no repeated blocks" in caplog.text


def test_where_nothing_can_be_captured_the_name_is_refused():
    model = Net()
    with pytest.raises(ConfigError, match="run 'pieces': blocks can be captured on a GPU only"):
        hotloop.Loop(model, torch.optim.SGD(model.parameters()), run=PIECES)
    with pytest.raises(ConfigError, match="one by one"):
        hotloop.Loop(model, torch.optim.SGD(model.parameters()), run="pieces+graph")
