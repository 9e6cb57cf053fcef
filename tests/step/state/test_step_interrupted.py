"""An interrupt while state is exchanged, restored or written back waits until the state is whole, and goes on then.

A signal is raised at a bytecode of what does that, one a run, and its handler raises. The state has to be that from
before the step or that from after it.

A place is one bytecode of one function that Python reaches right after it has looked for signals, tried when it is
reached first; later rounds of a loop are not tried. The stages have some 5,100 places, of 26,300 bytecodes: the tests try
16 of each stage, and the long ones each third of all.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
import signal
import sys
from unittest import mock

import pytest
import torch
from step_programs import GRAPH
from torch import nn

import hotloop
from hotloop.step import tiers
from hotloop.step.capture.recording import CapturedStep
from hotloop.step.policy.policy import SetTier
from hotloop.step.prove.check import Check
from hotloop.step.rescue import Rescue
from hotloop.testing import captured_step_emulation

EXCHANGING = (
    *("interrupts", "_torch/random_state", "_torch/places", "step/rescue", "step/state/snapshot"),
    *("step/state/holdings", "step/state/trial_run", "step/state/snapshot", "step/prove/proof"),
    *("step/prove/wide_reference", "step/prove/check"),
    *("step/capture/recording", "step/capture/optimizers", "testing/captured"),
)
STAGES = {
    "proof of code": ("aot_eager", 2),
    "warm-up": (GRAPH, 2),
    "capture": (GRAPH, 3),
    "proof": (GRAPH, 4),
    "undo": (GRAPH, 8),
    "replay": (GRAPH, 8),
    "check of a recording": (GRAPH, 8),
    "check of code": ("aot_eager", 8),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(nn.functional.dropout(torch.relu(self.norm(self.into(x)))))


def state_of(model, optimizer):
    """Return everything that a checkpoint holds, gradients, and what is the process's."""
    parameters = list(model.parameters())
    return {
        **{name: value.clone() for name, value in model.state_dict().items()},
        **{
            f"state {index} {key}": value.clone()
            for index, parameter in enumerate(parameters)
            for key, value in optimizer.state[parameter].items()
        },
        **{f"gradient {index}": parameter.grad.clone() for index, parameter in enumerate(parameters)},
        "random": torch.get_rng_state(),
        "groups": [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups],
        "ambient": (
            torch.is_grad_enabled(),
            torch.is_autocast_cache_enabled(),
            gc.isenabled(),
            len(optimizer._optimizer_step_pre_hooks),
        ),
        "handler": signal.getsignal(signal.SIGUSR1),
    }


def differs(ours, theirs):
    """Name what differs between two states; empty where nothing does."""

    def equal(one, other):
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other

    if ours.keys() != theirs.keys():
        return str(ours.keys() ^ theirs.keys())
    return next((name for name in ours if not equal(ours[name], theirs[name])), "")


def _interrupt(*_):
    raise KeyboardInterrupt


@functools.cache
def _after_a_look_for_signals(code):
    """Find the bytecodes before which Python handles signals: it does so after a call, at a start, and on the way back.

    Entering a context is a call as well: a lock that is waited for handles them.
    """
    listed = list(dis.get_instructions(code))
    calls = ("RESUME", "CALL", "BEFORE_WITH")
    after = {then.offset for one, then in itertools.pairwise(listed) if one.opname.startswith(calls)}
    return after | {one.argval for one in listed if "JUMP_BACKWARD" in one.opname}


def _is_traced(_, **_how):
    return sys.gettrace() is not None


class Interrupted:
    """A run of a stage that is interrupted at one bytecode of what exchanges state; at none for 0."""

    def __init__(self, stage, at):
        self.bytecodes, self.where, self._at = 0, None, at
        self.places = {}
        """The number of the bytecode that reached each place first."""
        self.excuse = ""
        """Why a signal of just now may leave a state between the two."""
        asked, number = STAGES[stage]
        torch.set_grad_enabled(True)
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=2**-6)
        batches = [torch.randn(8, 4) for _ in range(number + 1)]
        share = 0.5 if stage.startswith("check") else None
        with captured_step_emulation(), mock.patch.object(Check, "due", _is_traced):
            self._run(stage, model, optimizer, batches, hotloop.Loop(model, optimizer, run=asked, sentinel=share))

    def _run(self, stage, model, optimizer, batches, loop):
        def squares(made):
            return made.square().mean()

        loss_of = torch.compile(squares, backend="eager") if stage.startswith("comparison") else squares

        @loop.step
        def train_step(x):
            self.excuse = "the user's own step: it leaves what it leaves in eager"
            loss = loss_of(model(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            self.excuse = ""
            return loss.detach()

        def fails(captured, leaves):
            # From here to where signals are held off for the undo, as in a step of the user's own.
            self.excuse = "half of a step is done, and nothing knows yet that it failed"
            captured._parts_done = 0  # no optimizer has stepped
            torch.rand(3)
            model.norm.running_mean.add_(1)
            model.into.weight.grad.add_(1)
            raise RuntimeError("this replay has failed")

        for batch in batches[:-1]:
            train_step(batch)
        self.before, self.raised = state_of(model, optimizer), False
        with mock.patch.object(CapturedStep, "replay", fails) if stage == "undo" else contextlib.nullcontext():
            sys._getframe().f_trace_opcodes = True  # Python 3.12 counts no bytecode elsewhere without it
            sys.settrace(self._trace)
            try:
                train_step(batches[-1])
            except KeyboardInterrupt:
                self.raised = True
            finally:
                sys.settrace(None)
        self.left = state_of(model, optimizer)
        loop.close()

    def _trace(self, frame, _event, _argument):
        if not any(f"hotloop/{one}.py" in frame.f_code.co_filename for one in EXCHANGING):
            return None
        if frame.f_code is Rescue.recover.__wrapped__.__code__:
            self.excuse = ""
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame, event, _argument):
        if event == "opcode":
            self.bytecodes += 1
            if frame.f_lasti in _after_a_look_for_signals(frame.f_code):
                self.places.setdefault((frame.f_code, frame.f_lasti), self.bytecodes)
            if self.bytecodes == self._at:
                self.where = frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno, self.excuse
                signal.raise_signal(signal.SIGUSR1)
        return self._count


def torn(stage, chosen, within=""):
    """Interrupt a stage at the places of a file that are chosen; return where the state is neither nor, and how."""
    own = signal.signal(signal.SIGUSR1, _interrupt)
    try:
        whole = Interrupted(stage, 0)
        found = []
        for at in chosen(sorted(number for (code, _), number in whole.places.items() if within in code.co_filename)):
            run = Interrupted(stage, at)
            assert run.raised, f"an interrupt was lost: {run.where}"
            what = differs(run.before, run.left), differs(whole.left, run.left)
            if all(what) and not run.where[3]:
                found.append((run.where, what))
    finally:
        signal.signal(signal.SIGUSR1, own)
    return found


@pytest.mark.campaign
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.some_of(3)
def test_an_interrupt_leaves_the_state_from_before_the_step_or_from_after_it(stage):
    assert not torn(stage, lambda places: [places[(2 * part + 1) * len(places) // 32] for part in range(16)])


@pytest.mark.campaign
def test_an_interrupt_in_any_operation_of_a_replay_comes_before_all_of_it_or_after():
    """As on a GPU, where a replay is one launch: on the stand-in, step counts moved without the averages of Adam."""
    bytecodes = Interrupted("replay", 0).bytecodes
    assert not torn("replay", lambda _: range(bytecodes // 20, bytecodes, bytecodes // 20))


def test_an_interrupt_while_the_tier_changes_comes_when_it_has_changed(monkeypatch):
    own = signal.signal(signal.SIGUSR1, _interrupt)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    first = lambda _: signal.raise_signal(signal.SIGUSR1)  # noqa: E731
    try:
        with captured_step_emulation():
            loop = hotloop.Loop(model, optimizer, run=GRAPH)
            monkeypatch.setattr("hotloop.step.capture.optimizers.return_step_counts", first)
            with pytest.raises(KeyboardInterrupt):
                loop.transitions.apply([SetTier(tiers.parse(one), "") for one in ("eager", "aot_eager")])
        assert loop.tier.name == "aot_eager"
    finally:
        signal.signal(signal.SIGUSR1, own)


@pytest.mark.campaign
@pytest.mark.long
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_at_many_places_leaves_the_state_from_before_the_step_or_from_after_it(stage, first):
    assert not torn(stage, lambda places: places[first::6])
