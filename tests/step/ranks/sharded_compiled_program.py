"""Processes whose sharded steps are compiled: ``python sharded_compiled_program.py STORE RANK SIZE SCENARIO...``.

Each scenario trains once eagerly and once in a tier that compiles, and prints JSON of both. With
``PEERS_BACKEND=nccl`` each process has a GPU.
"""

import contextlib
import sys

import sharded_program
import torch
from auto_program import TOTAL, paced
from captured_program import DEVICE, RANK, SIZE, STORE, main
from sharded_program import _USUAL, adamw, beside_eager, sharded, synced_last
from three_blocks import Blocks
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hotloop._torch.sharded import shard_of
from hotloop.errors import StepLostError
from hotloop.step import tiers
from hotloop.testing import planted_failure

tiers.BASES["regional"] = {"preset": "aot_eager", "regions": "blocks"}  # Inductor takes minutes


def blocks(*, change=None, **how):
    """Return a model that is sharded by blocks.

    Args:
        change: called with the model before it is sharded.
        how: arguments of `fully_shard`.
    """
    torch.manual_seed(0)
    model = Blocks().to(DEVICE)
    if change is not None:
        change(model)
    for block in model.blocks:
        fully_shard(block, **how)
    return fully_shard(model, **how)


def trained(run="regional", *, made=blocks, **how):
    """Train both ways; return what a test looks at."""
    told = beside_eager(run, made=made, exactly=False, **how)
    told["steps"] = sum(letter == "r" for letter in told["log"])
    return told


def evaluate(model):
    with torch.no_grad():
        model.eval()(torch.ones(3, 6, device=DEVICE))
    model.train()


def evaluates_each(every):
    def between(number, model, _optimizer):
        if number % every == 0:
            evaluate(model)

    return between


def evaluated(every, **how):
    return trained(between=evaluates_each(every), **how)


CAPTURED = {"eager": 10.0, "eager+graph": 8.0, "regional": 9.0, "regional+graph": 4.0}


def chosen(pace=None, *, between=None, **milliseconds):
    """Auto chooses in a long run, by planted times."""
    with paced(pace or milliseconds):
        return trained("auto", steps=140, total=TOTAL, between=between)


def over_calls(**how):
    """Gradients are used in every second call."""
    sharded_program.ALWAYS = False
    try:
        return trained(**how)
    finally:
        sharded_program.ALWAYS = True


def switching(since):
    """Return what has every second call keep whole gradients, from one on."""
    return lambda number, model, _optimizer: model.set_requires_gradient_sync(number < since or number % 2 == 1)


def unsynced(since):
    return trained(between=switching(since))


def unsynced_within(keeps, **how):
    """The step itself switches reducing off and on in some calls, and leaves whole gradients."""
    phase = {}

    def between(number, *_):
        phase["syncs"] = not keeps(number)

    return trained(between=between, syncs=lambda _update: phase["syncs"], **how)


def each_of(calls, scenario):
    """Live through a scenario for each of some calls; return what they tell together."""
    told = [scenario(at) for at in calls]
    return {"same": all(one["same"] for one in told), "lasts": [one["last"] for one in told]}


def switched_for_the_next(at):
    """A step ends with another setting than it began with, and the next one puts it back."""
    phase, held = {}, []

    def made():
        held[:] = [blocks()]
        return held[0]

    def between(number, *_):
        phase["next"] = number != at

    def clear(optimizer):
        optimizer.zero_grad()
        held[0].set_requires_gradient_sync(phase["next"])

    return trained(made=made, between=between, clear=clear, steps=12)


def set_at(number, change):
    """Return what changes a model before one call."""

    def between(now, model, _optimizer):
        if now == number:
            change(model)

    return between


def scaled(model):
    for block in model.blocks:
        block.scale = 0.5


def undropped(model):
    for block in model.blocks:
        block.drop.p = 0.0


def frozen(model):
    model.blocks[0].requires_grad_(requires_grad=False)
    model.first.requires_grad_(requires_grad=False)


def recomputed(model):
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)


def prefetched(model):
    """Gather two blocks ahead, in an order that a program has set."""
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    return model


def resumed(**how):
    """The run goes back to a checkpoint of torch's that was saved in the middle of it."""
    place = f"{STORE}.checkpoint"

    def between(number, model, optimizer):
        if number not in {30, 45}:
            return
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        if number == 30:
            checkpoint.save(states, checkpoint_id=place)
        else:
            checkpoint.load(states, checkpoint_id=place)
            set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])

    return trained(between=between, **how)


def planted(stage, after, **how):
    """A compiled block fails in one process, once it has run so often."""
    with planted_failure(stage, after=after) if RANK == SIZE - 1 else contextlib.nullcontext() as failure:
        try:
            told = trained(**how)
        except StepLostError as error:
            return {"raised": str(error)}
    return told | {"fired": failure.fired if failure is not None else 0}


def divided():
    """What gradients are divided by changes while compiled code is in force."""

    def made():
        model = blocks()
        for one in (model, *model.blocks):
            one.set_force_sum_reduction_for_comms(True)
        return model

    def change(model):
        for one in (model, *model.blocks):
            one.set_gradient_divide_factor(8.0)

    return trained(made=made, between=set_at(35, change), clips=False)


def flaky(at):
    """An exception in one process after its collectives, which the program catches."""

    def between(number, *_):
        sys.setswitchinterval(2 * _USUAL if (number, RANK) == (at, SIZE - 1) else _USUAL)

    return trained(between=between, steps=20)


def taught():
    """The step calls a sharded model that the loop was not given."""
    teacher = blocks()

    def inside(_model, _last):
        with torch.no_grad():
            teacher(torch.ones(3, 6, device=DEVICE))

    return trained(inside=inside)


def evaluates_inside():
    """The step ends with a forward that no backward follows."""
    held = []

    def made():
        held[:] = [blocks()]
        return held[0]

    def clear(optimizer):
        optimizer.zero_grad()
        with torch.no_grad():
            held[0](torch.ones(3, 6, device=DEVICE))

    return trained(made=made, clear=clear)


def averaged():
    """The step averages its shards, and the loop is given the average."""
    average, earlier = [], []

    def made():
        model = blocks()
        earlier[:] = average
        average[:] = [one.detach().clone() for one in model.parameters()]
        return model

    def inside(model, _last):
        for ours, now in zip(average, model.parameters(), strict=True):
            ours.lerp_(now.detach(), 0.1)

    told = trained(made=made, inside=inside, state=[average])
    told["same"] &= all(torch.allclose(shard_of(a), shard_of(b)) for a, b in zip(average, earlier, strict=True))
    return told


def hooked_alone():
    """One process alone has a hook from one call on, and leaves: what an evaluation has left whole stays alike."""

    def between(number, model, _optimizer):
        if number == 35 and RANK == SIZE - 1:
            for one in (model, *model.blocks):
                one.set_all_reduce_hook(lambda gradient: gradient)
        if number % 2:
            evaluate(model)

    return trained(between=between, steps=100)


def made_late():
    """The loop is made after an evaluation, which has left whole parameters."""
    held = []

    def made():
        held[:] = [blocks()]
        return held[0]

    def by(parameters):
        optimizer = adamw(parameters)
        evaluate(held[0])
        return optimizer

    return trained(made=made, by=by)


def raises_within(at):
    """The program raises between two blocks in all processes, and catches it."""
    phase = {}

    def made():
        model = blocks()
        model.blocks[1].register_forward_pre_hook(lambda *_: raised() if phase.get("now") else None)
        return model

    def raised():
        raise sharded_program.FlakyError

    def between(number, *_):
        phase["now"] = number == at

    return trained(made=made, between=between, steps=20)


def half(**how):
    """Products and gathered parameters in 16 bits; without dropout, whose backward aot_eager rounds otherwise there."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trained(made=lambda: blocks(change=undropped, mp_policy=policy), **how)


def kept_unsharded(model):
    model.set_reshard_after_backward(reshard_after_backward=False)


def hooked(model):
    for one in (model, *model.blocks):
        one.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5))


WAYS = {
    "plain": trained,
    "whole": lambda: trained("aot_eager"),
    "bare layers": lambda: trained("aot_eager", made=sharded),
    "inductor": lambda: trained("full", steps=40),
    "kept whole": lambda: trained(made=lambda: blocks(reshard_after_forward=False)),
    "never whole": lambda: trained(made=lambda: blocks(reshard_after_forward=True)),
    "half": half,
    "unclipped": lambda: trained(clips=False),
    "zeroed": lambda: trained(clear=lambda one: one.zero_grad(set_to_none=False)),
    "twice": lambda: trained(times=2),
    "synced last": lambda: trained(times=2, inside=synced_last),
    "over calls": over_calls,
    "evaluated often": lambda: evaluated(2),
    "evaluated": lambda: evaluated(16),
    "bare evaluated": lambda: evaluated(2, run="aot_eager", made=sharded),
    "made late": made_late,
    "begun": lambda: trained(between=lambda _number, model, _: model.unshard(async_op=True)),
    "prefetched": lambda: trained(made=lambda: prefetched(blocks())),
    "frozen": lambda: trained(made=lambda: blocks(change=frozen)),
    "recomputed": lambda: trained(made=lambda: blocks(change=recomputed)),
    "recomputed by inductor": lambda: trained("full", made=lambda: blocks(change=recomputed), steps=40),
    "averaged": averaged,
    "taught": taught,
    "divided": divided,
    "reshards": lambda: trained(between=set_at(35, lambda model: model.set_reshard_after_forward(False))),
    "frozen later": lambda: trained(between=set_at(35, lambda model: model.blocks[1].requires_grad_(False))),
    "scaled": lambda: trained(between=set_at(35, scaled), steps=100),
    "undropped": lambda: trained(between=set_at(35, undropped), steps=100),
    "evaluates": lambda: trained(between=set_at(35, lambda model: model.blocks[1].eval()), steps=100),
    "short batches": lambda: trained(sizes=lambda number: 4 if RANK == SIZE - 1 and number % 9 == 7 else 6),
    "resumed": resumed,
    "flaky": lambda: each_of(range(6), flaky),
    "raises within": lambda: each_of((0, 2, 10), raises_within),
    "checked": lambda: trained(steps=300, sentinel=0.5),
    "unsynced": lambda: unsynced(0),
    "unsynced later": lambda: unsynced(30),
    "unsynced over calls": lambda: over_calls(between=switching(30)),
    "unsynced within": lambda: unsynced_within(lambda number: number % 2 == 0),
    "unsynced within later": lambda: unsynced_within(lambda number: number >= 30 and number % 2 == 0),
    "unsynced in a proof": lambda: each_of(range(4), lambda at: unsynced_within(lambda number: number == at, steps=12)),
    "switched for the next": lambda: each_of(range(4), switched_for_the_next),
    "unsynced and fails": lambda: planted("backward run", 96, between=switching(30)),
    "kept unsharded": lambda: trained(between=set_at(35, kept_unsharded)),
    "not last": lambda: trained(between=lambda number, model, _: model.set_is_last_backward(number < 30 or number % 2)),
    "hooked": lambda: trained(between=set_at(35, hooked)),
    "hooked alone": hooked_alone,
    "evaluates inside": evaluates_inside,
    "fails in a forward": lambda: planted("forward run", 60),
    "fails in a backward": lambda: planted("backward run", 60),
    "fails in a proof": lambda: planted("forward run", 4),
    "fails in a proof's backward": lambda: planted("backward run", 4),
    "fails between backwards": lambda: planted("forward run", 124, times=2, inside=synced_last),
    "fails to compile": lambda: planted("forward compile", 0),
    "captured": lambda: trained("aot_eager+graph"),
    "captured by blocks": lambda: trained("regional+graph"),
    "captured, evaluated": lambda: evaluated(2, run="regional+graph"),
    "captured, resumed": lambda: resumed(run="regional+graph"),
    "captured, unsynced": lambda: trained("regional+graph", between=switching(30)),
    "captured, compiled anew": lambda: trained("regional+graph", between=set_at(35, scaled), steps=100),
    "captured, in 16 bits": lambda: half(run="regional+graph"),
    "auto": lambda: trained("auto"),
    "auto compiles": lambda: chosen(eager=10.0, regional=5.0),
    "auto compiles, evaluated": lambda: chosen(eager=10.0, regional=5.0, between=evaluates_each(7)),
    "auto compiles, unsynced": lambda: chosen(eager=10.0, regional=5.0, between=switching(60)),
    "auto captures": lambda: chosen(CAPTURED),
    "auto captures, unsynced": lambda: chosen(CAPTURED, between=switching(90)),
}


if __name__ == "__main__":
    main(WAYS)
