"""Processes under ``run="auto"`` that may compile: run as ``python auto_compiled_program.py STORE RANK SIZE SCENARIO...``.

As in `auto_program`, the times that the policy hears of are planted, and tiers without one are not tried. What is
compiled is compiled by `aot_eager`; the policy expects what Inductor takes.
"""

import contextlib
import functools
import logging
import os
import sys

import torch
from auto_program import FASTER, LETTERS, TOTAL, chosen, on_rank_1, paced, slowed
from captured_program import _USUAL, CAPTURES, RANK, comes_late, main, train
from three_blocks import Blocks
from torch.nn.parallel import DistributedDataParallel

import hotloop
from hotloop.errors import StepLostError
from hotloop.step import tiers
from hotloop.step.capture.in_and_out import Inputs
from hotloop.step.compiled import Compiled
from hotloop.testing import planted_failure

for base in ("regional", "full"):  # Inductor takes minutes
    tiers.BASES[base] = {**tiers.BASES[base], "preset": "aot_eager"}

BLOCKS = functools.partial(Blocks, 3)
FULL = {"eager": 10.0, "full": 5.0}
ALL = {**FASTER, "eager+graph": 8.0, "regional": 7.0, "regional+graph": 6.0, "full": 7.0, "full+graph": 4.0}


def compiled(*pace, **how):
    """Train where no captured step is tried."""
    return chosen(*(pace or (FULL,)), **how)


def fails(stage, after=0, **how):
    """Compiled code of one process fails before the first collective of a step: buffers are not sent."""
    with planted_failure(stage, after=after) if RANK == 1 else contextlib.nullcontext() as failure:
        told = compiled(wrap={"broadcast_buffers": False}, **how)
    return {**told, "fired": failure.fired if RANK == 1 else 1}


def said():
    """What the log says by the time that the compiler is called."""
    lines, found, log = [], [], logging.getLogger("hotloop")
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with planted_failure("forward compile", after=99) as failure:
            failure.reach = lambda: found.append([line for line in lines if "compile full now" in line])
            told = compiled()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return {**told, "said": found}


def one_fails():
    """Of one process no part of the model reaches the compiler as a whole; by blocks it does."""
    real = Compiled.idle

    def idle(self):
        return "planted: nothing compiled" if self.base == "full" else real(self)

    return compiled({**FULL, "regional": 6.0}, net=BLOCKS, planted=on_rank_1(Compiled, "idle", idle))


def replay_fails():
    """A replay of compiled code fails in one process, once it is in force."""
    times, real = [], Inputs.fill

    def fill(self, leaves):
        times.append(1)
        if len(times) == 60:
            raise RuntimeError("planted: no replay")
        return real(self, leaves)

    return chosen(ALL, planted=on_rank_1(Inputs, "fill", fill), steps=160)


def flaky(places, trains, steps):
    """An exception that one process catches after the collectives of a step, at each place on the way."""
    told = {}
    for at in places:
        one = trains(flaky=at, steps=steps)
        told[at] = one["same"], one["tier"]
    return {"same": all(same for same, _ in told.values()), "tiers": sorted({tier for _, tier in told.values()})}


def two_steps():
    """Two decorated steps by turns, of which the second one's compiled code comes later."""

    def trained(run):
        torch.manual_seed(0)
        model = DistributedDataParallel(Blocks(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loop, ran = hotloop.Loop(model, optimizer, run=run, total_steps=TOTAL, sentinel=0), ""

        def made(power):
            def step(x):
                loss = (model(x) ** power).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            return loop.step(step)

        steps, draws = (made(2), made(4)), torch.Generator().manual_seed(RANK)
        torch.manual_seed(100 + RANK)
        for number in range(100):
            steps[number >= 30 and number % 2](torch.randn(6, 6, generator=draws))
            ran += LETTERS[loop.last_ran()[0]]
        left, status = torch.cat([value.detach().flatten() for value in model.parameters()]), loop.status()
        loop.close()
        return left, ran, status.tier

    eager, *_ = trained("eager")
    with CAPTURES(), paced(FULL):
        ours, ran, tier = trained("auto")
    return {"same": torch.allclose(eager, ours, rtol=1e-5, atol=1e-6), "tier": tier, "tiers": ran}


def evaluate(number, model):
    if number % 5 == 4:
        model.eval()
        with torch.no_grad():
            model(torch.ones(3, 6))
        model.train()


def anew():
    """One process compiles other code while the tier is in force."""

    def between(number, model):
        if number == 60:
            model.module.scale = 0.5 if RANK == 1 else 1.0

    return compiled(between=between, steps=160)


def ends(at):
    """One process ends before a step."""

    def between(number, model):
        if (number, RANK) == (at, 1):
            os._exit(9)

    with CAPTURES(), paced(FULL):
        try:
            train("auto", total=TOTAL, between=between)
        except (StepLostError, RuntimeError) as error:
            return {"raised": f"{type(error).__name__}: {error}"}
    return {"raised": ""}


def raises():
    """An exception of one process ends it, before the collectives of a step that all run both ways."""

    def inside(_out):
        if sys.getswitchinterval() > _USUAL:
            raise ValueError("the program's own")

    with CAPTURES(), paced(FULL):
        try:
            train("auto", total=TOTAL, wrap={"broadcast_buffers": False}, inside=inside, flaky=9)
        except (StepLostError, ValueError) as error:
            return {"raised": f"{type(error).__name__}: {error}"}
    return {"raised": ""}


WAYS = {
    "full": compiled,
    "regional": lambda: compiled({"eager": 10.0, "regional": 5.0}, net=BLOCKS),
    "captured": lambda: chosen(ALL, steps=120),
    "captured blocks": lambda: chosen({**ALL, "regional+graph": 3.0}, net=BLOCKS, steps=200),
    "slower": lambda: compiled({"eager": 10.0, "full": 20.0}, steps=120),
    "slowest": lambda: compiled(FULL, {"eager": 10.0, "full": 20.0}, steps=120),
    "slower graph": lambda: chosen({**ALL, "full+graph": 20.0}, steps=160),
    "short": lambda: compiled(total=TOTAL if RANK else 2000),
    "short captured": lambda: chosen(ALL, total=TOTAL if RANK else 2000),
    "host read": lambda: chosen(ALL, inside=lambda out: out.sum().item() if RANK == 1 else None, steps=120),
    "unused": lambda: chosen(ALL, wrap={"find_unused_parameters": True}),
    "fails to compile": lambda: fails("forward compile"),
    "fails in a trial": lambda: fails("forward run", 10),
    "fails in force": lambda: fails("forward run", 40, steps=120),
    "one fails": one_fails,
    "replay fails": replay_fails,
    "flaky": lambda: flaky(range(8, 24), compiled, 48),
    "flaky captured": lambda: flaky(range(51, 59), lambda **how: chosen(ALL, **how), 100),
    "said": said,
    "short in a proof": lambda: chosen(ALL, sizes=lambda number: 4 if RANK == 1 and number == 53 else 6, steps=120),
    "short batches": lambda: compiled(sizes=lambda number: 4 if RANK == 1 and number % 9 == 7 else 6, steps=120),
    "varying shapes": lambda: compiled(sizes=lambda number: 6 + (number * 2 + RANK) % 90, steps=120),
    "evaluated": lambda: compiled(between=evaluate),
    "accumulated": lambda: compiled(within=lambda number, model: model.no_sync() if number % 2 == 0 else None),
    "anew": anew,
    "slowed": lambda: slowed(FULL, "full", steps=240),
    "two steps": two_steps,
    "late": lambda: comes_late("late", 31, compiled),  # a call that is voted on, as every 32nd compiled one is
    "ends": lambda: ends(60),
    "raises": raises,
}

if __name__ == "__main__":
    main(WAYS)
