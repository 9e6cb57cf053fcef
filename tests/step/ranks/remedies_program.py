"""Steps of several processes that are declined, and the same ones with the remedy followed.

Run as ``python remedies_program.py STORE RANK SIZE NAME...``. Each case trains as it is written and with the remedy of
its line followed, each beside eager, with ``eager+graph`` on the CPU's emulation, and prints JSON of what it came to.
"""

import copy
import datetime as dt
import json
import sys
import warnings

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

import hotloop
from hotloop.testing import captured_step_emulation

warnings.simplefilter("ignore")
STORE, RANK, SIZE, NAMES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
STEPS = 100


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


class Case:
    """A program by its parts: each case overrides one, by whether its remedy is followed."""

    def __init__(self, *, followed):
        self.followed = followed
        self.model = self.wrap(net())
        self.given = [self.model]

    def wrap(self, model):
        return DistributedDataParallel(model)

    def batch(self, number, draws):
        return (torch.randn(6, 6, generator=draws),)

    def loss(self, x):
        return self.model(x).square().mean()

    def returns(self, loss):
        return loss.detach()

    def ends(self):
        """What the step does last."""

    def note(self, result):
        """What is done between two steps."""


class Lengths(Case):
    """Batches whose sizes never come twice in one process, and batches that are padded to one size."""

    def batch(self, number, draws):
        rows = torch.randn(6 + number * RANK, 6, generator=draws)
        if self.followed:
            longest = torch.zeros(6 + STEPS, 6)
            return pad_sequence([rows, longest], batch_first=True)[0], torch.tensor(len(rows))
        return rows, torch.tensor(len(rows))

    def loss(self, x, rows):
        return self.model(x).square().sum(1).mul(torch.arange(len(x)) < rows).sum() / rows


class Rank(Case):
    """A text among the arguments that is a new one in each call of one process, and none."""

    def batch(self, number, draws):
        batch = super().batch(number, draws)
        return batch if self.followed else (*batch, f"shard-{RANK * number}.bin")

    def loss(self, x, _path=""):
        return super().loss(x)


class Unused(Case):
    """find_unused_parameters=True where every parameter is used, and without it."""

    def wrap(self, model):
        return DistributedDataParallel(model, find_unused_parameters=not self.followed)


class Hooked(Case):
    """A communication hook, and none."""

    def wrap(self, model):
        wrapped = DistributedDataParallel(model)
        if not self.followed:
            wrapped.register_comm_hook(None, _mean)
        return wrapped


def _mean(_state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(SIZE), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Teacher(Case):
    """A second model of several processes that the loop was not given, and was."""

    def __init__(self, *, followed):
        super().__init__(followed=followed)
        self.other = DistributedDataParallel(copy.deepcopy(self.model.module))
        self.given = [self.model, self.other] if followed else [self.model]

    def loss(self, x):
        return (self.model(x) - 0.5 * self.other(x)).square().mean()


class Reads(Case):
    """One process reads its loss on the host within the step, and after it."""

    def loss(self, x):
        loss = super().loss(x)
        if RANK == 1 and not self.followed:
            self.note(loss.item())
        return loss

    def note(self, result):
        self.noted = float(result)


class SpreadResult(Case):
    """The step returns a DTensor, and its local part."""

    def returns(self, loss):
        rows = loss.detach().reshape(1)
        return rows if self.followed else DTensor.from_local(rows, MESH, [Shard(0)])


class SpreadArgument(Case):
    """The step is given a DTensor, and its local part."""

    def batch(self, number, draws):
        (x,) = super().batch(number, draws)
        return (x,) if self.followed else (DTensor.from_local(x, MESH, [Shard(0)]),)

    def loss(self, x):
        return super().loss(x if self.followed else x.to_local())


class Unset(Case):
    """A step of FSDP2 that leaves a setting otherwise than it finds it, and one that sets it back."""

    def wrap(self, model):
        for part in model:
            if isinstance(part, nn.Linear):
                fully_shard(part)
        return fully_shard(model)

    def ends(self):
        self.model.set_requires_all_reduce(False)
        if self.followed:
            self.model.set_requires_all_reduce(True)

    def note(self, result):
        self.model.set_requires_all_reduce(True)


CASES = {
    "lengths": Lengths, "rank": Rank, "unused": Unused, "hooked": Hooked, "teacher": Teacher, "reads": Reads,
    "spread result": SpreadResult, "spread argument": SpreadArgument, "unset": Unset,
}  # fmt: skip


def train(kind, run, *, followed):
    """Train a case; return its losses, its parameters and the status of its loop."""
    case = kind(followed=followed)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=2**-6, fused=True)
    loop = hotloop.Loop(case.given, optimizer, run=run, total_steps=STEPS, sentinel=0)

    @loop.step
    def step(*batch):
        loss = case.loss(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        case.ends()
        return case.returns(loss)

    draws, losses = torch.Generator().manual_seed(RANK), []
    for number in range(STEPS):
        loss = step(*case.batch(number, draws))
        case.note(loss if not isinstance(loss, DTensor) else loss.to_local())
        losses.append(loss.to_local() if isinstance(loss, DTensor) else loss)
    status, last = loop.status(), loop.last_ran()
    parameters = [one.to_local() if isinstance(one, DTensor) else one for one in case.model.parameters()]
    left = torch.cat([one.detach().flatten() for one in parameters])
    loop.close()
    return torch.stack([one.flatten() for one in losses]), left, status, last


def told(kind, *, followed):
    losses, left, *_ = train(kind, "eager", followed=followed)
    with captured_step_emulation():
        ours, ours_left, status, last = train(kind, "eager+graph", followed=followed)
    same = torch.allclose(losses, ours, rtol=1e-5, atol=1e-6) and torch.allclose(left, ours_left, rtol=1e-5, atol=1e-6)
    return {"same": same, "last": list(last), "status": " ".join(str(status).replace("│", " ").split())}


if __name__ == "__main__":
    dist.init_process_group(
        "gloo", init_method=f"file://{STORE}", rank=RANK, world_size=SIZE, timeout=dt.timedelta(seconds=60)
    )
    MESH = init_device_mesh("cpu", (SIZE,))
    print(
        json.dumps(
            {name: [told(CASES[name], followed=followed) for followed in (False, True)] for name in NAMES or CASES}
        )
    )
    dist.destroy_process_group()
