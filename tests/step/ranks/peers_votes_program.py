"""Two processes whose steps do not keep pace: run as ``python peers_votes_program.py FOLDER RANK SCENARIO...``."""

import gc
import json
import os
import time

import torch
from peers_program import DEVICE, RANK, SCENARIOS, Net, meet, wrapped
from torch import distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F

import hotloop
from hotloop.step.prove import proof
from hotloop.step.ranks import peers as votes
from hotloop.step.state import trial_run

VOTE_SECONDS = 3.0


def made(kind, run):
    """Give a model, and a step that trains it, under a loop where one is wanted."""
    torch.manual_seed(0)
    model = Net().to(DEVICE) if kind == "local" else wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    loop = hotloop.Loop(model, optimizer, run=run) if run else None

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, loop, loop.step(train_step) if loop else train_step


def batch(step, rows=6):
    draws = torch.Generator().manual_seed(100 * RANK + step)
    x, y = torch.randn(rows, 6, generator=draws), torch.randint(3, (rows,), generator=draws)
    return x.to(DEVICE), y.to(DEVICE)


def trained(kind, run, steps, *, before=None, rows=lambda step: 6):
    """Train so many steps; gives parameters, and what the loop tells."""
    model, loop, step = made(kind, run)
    torch.manual_seed(RANK)
    with Join([model]) if kind == "ddp-nobuffers" else torch.enable_grad():
        for number in range(steps):
            if before is not None:
                before(number)
            step(*batch(number, rows(number)))
    left = {name: one.detach().clone() for name, one in model.named_parameters()}
    told = (loop.status(), loop.context.peers.unanswered) if loop else None
    if loop:
        loop.close()
    return left, told


def compared(*args, **settings):
    """Train eagerly and in a tier; gives whether they agree, and how it went."""
    eager, _ = trained(args[0], None, *args[1:], rows=settings.get("rows", lambda step: 6))
    torch.compiler.reset()
    dist.barrier()
    ours, (status, unanswered) = trained(args[0], "aot_eager", *args[1:], **settings)
    return {
        "same": all(torch.allclose(ours[name], eager[name], rtol=1e-5, atol=1e-6) for name in eager),
        "tiers": {one.name: one.steps for one in status.tiers},
        "status": str(status),
        "unanswered": unanswered,
    }


def alone():
    """Loops that nothing is agreed for, in one process only."""
    told = {}
    if RANK == 0:
        for run, disabled in (("eager", ""), ("auto", ""), ("aot_eager", "1")):
            os.environ["HOTLOOP_DISABLE"] = disabled
            _, loop, step = made("local", run)
            step(*batch(0))
            told[run] = loop.status().tier
            loop.close()
        os.environ["HOTLOOP_DISABLE"] = ""
    return told


def late():
    """One process is at something else for longer than a vote waits."""
    return compared("local", 70, before=lambda step: time.sleep(VOTE_SECONDS + 1) if (RANK, step) == (1, 32) else None)


def shapes():
    """Lengths that never come twice; then lengths that vary once the tier is proven."""
    asked, real = [], votes.Peers.lowest

    def lowest(self, about, *numbers):
        if about == votes.About.CALL:
            asked.append(numbers)
        return real(self, about, *numbers)

    votes.Peers.lowest = lowest
    try:
        never = compared("local", 80, rows=lambda step: 4 + step)
        return {**never, "votes": len(asked), "later": compared("local", 40, rows=lambda step: max(6, step - 12))}
    finally:
        votes.Peers.lowest = real


def begun():
    """Count a collective of a group that was made after the loop, and a vote."""
    _, loop, _ = made("local", "aot_eager")
    group = dist.new_group([0, 1])
    counts = [loop.context.peers.begun()]
    dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
    counts.append(loop.context.peers.begun())
    loop.context.peers.lowest(votes.About.CALL, 1)
    counts.append(loop.context.peers.begun())
    loop.close()
    return [count - counts[0] for count in counts]


def given_up(first):
    """Rank 0 gives up waiting in the third vote, which rank 1 goes through; ``first`` says who writes that down first."""
    real, reduced = dist.all_reduce, []

    def all_reduce(tensor, op, group):
        real(tensor, op, group=group)
        reduced.append(1)
        if len(reduced) == 3:
            time.sleep(0.0 if first == RANK else 0.5)
            if RANK == 0:
                raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")

    _, loop, _ = made("local", "aot_eager")
    dist.all_reduce = all_reduce
    try:
        found = [loop.context.peers.lowest(votes.About.CALL, 1) for _ in range(5)]
    finally:
        dist.all_reduce = real
    dist.barrier()
    told = loop.context.peers.unanswered
    loop.close()
    return {"votes": found, "unanswered": told}


def again():
    """A loop after one that was lost, in the same processes."""
    told = []
    for error, ours in ((RuntimeError("planted"), True), (RuntimeError("Connection closed by peer"), False)):
        _, loop, _ = made("local", "aot_eager")
        told.append(str(loop.context.peers.lost(error, "in step 1", ours=ours)))
        dist.barrier()
        loop.close()
    return told


def no_memory(home, name):
    """One process has no memory for a copy that a proof takes."""
    real = getattr(home, name)

    def fails(*args, **settings):
        raise torch.OutOfMemoryError("planted: no memory for a copy")

    if RANK == 1:
        setattr(home, name, fails)
    try:
        return compared("ddp", 12)
    finally:
        setattr(home, name, real)


RUNS = {
    "waiter first": lambda: given_up(0),
    "waiter last": lambda: given_up(1),
    "again": again,
    "no memory before": lambda: no_memory(trial_run, "Snapshot"),
    "no memory between": lambda: no_memory(proof, "Snapshot"),
    "shapes": shapes,
    "begun": begun,
    "alone": alone,
    "uneven": lambda: compared("ddp-nobuffers", 70 if RANK == 0 else 40),
    "closed": lambda: compared("local", 70 if RANK == 0 else 40),
    "late": late,
}


def main():
    meet()
    votes.VOTE_SECONDS = VOTE_SECONDS
    told = {}
    for name in SCENARIOS:
        told[name] = RUNS[name]()
        gc.collect()
        dist.barrier()
    print(json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
