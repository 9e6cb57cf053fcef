"""Processes that ask their loops for different things, or call them apart: run as ``python settings_program.py STORE RANK SIZE SCENARIO...``.

`auto_program` has what trains, and plants the times.
"""

import contextlib
from unittest import mock

import torch
from auto_program import FASTER, TOTAL, chosen, paced
from captured_program import RANK, Net, main, train
from torch.nn.parallel import DistributedDataParallel

import hotloop
from hotloop.errors import ConfigError
from hotloop.testing import captured_step_emulation


@contextlib.contextmanager
def asked_for(**by_rank):
    """Train in a loop whose settings differ from process to process."""
    made, ours = hotloop.Loop, {name: values[RANK] for name, values in by_rank.items()}
    with mock.patch.object(hotloop, "Loop", lambda *parts, **same: made(*parts, **{**same, **ours})):
        yield


def refused(**by_rank):
    """Return what a loop says that is not asked for the same as the other process's."""
    try:
        with asked_for(**by_rank), captured_step_emulation():
            train("eager+graph", steps=4)
    except ConfigError as error:
        return {"message": str(error)}
    return {"message": ""}


def trained(*pace, **by_rank):
    with asked_for(**by_rank):
        return chosen(*pace)


def called_apart(run, *, alone_at=None, argument=None):
    """Train; the first process may evaluate alone, by a decorated step, after one of the steps."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with captured_step_emulation(), paced(FASTER):
        loop, ran = hotloop.Loop(model, optimizer, run=run, total_steps=TOTAL, sentinel=0), ""

        @loop.step
        def step(x, name):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        @loop.step
        def evaluate(x):
            with torch.no_grad():
                return model.module(x).mean()

        for number in range(80):
            step(torch.randn(6, 6), argument)
            ran += "eg"[loop.last_ran()[0] == "eager+graph"]
            if (number, RANK) == (alone_at, 0):
                evaluate(torch.randn(6, 6))
        status = loop.status()
        loop.close()
    # Rows of `status` have borders.
    words = " ".join(str(status).replace("│", " ").split())
    left = [value.detach().flatten() for value in model.parameters()]
    return {"graph": ran, "status": words, "left": torch.cat(left).tolist()}


WAYS = {
    "evaluates alone": lambda: called_apart("eager+graph", alone_at=40),
    "evaluates alone by auto": lambda: called_apart("auto", alone_at=40),
    "another name": lambda: called_apart("eager+graph", argument=f"rank {RANK}"),
    "sentinel": lambda: refused(sentinel=(None, 0.01)),
    "auto and a tier": lambda: refused(run=("auto", "eager+graph")),
    "two tiers": lambda: refused(run=("aot_eager", "eager+graph")),
    # Without a graph there are no checks.
    "sentinel without a graph": lambda: refused(sentinel=(None, 0.01), run=("aot_eager", "aot_eager")),
    "length of one": lambda: trained(FASTER, total_steps=(60, None)),
    "length of the other": lambda: trained(FASTER, total_steps=(None, 60)),
    # A capture is too dear for so short a run of so slow steps, unless many more runs come.
    "runs": lambda: trained({"eager": 1000.0, "eager+graph": 500.0}, total_steps=(20, 20), runs=(None, 1000.0)),
}

if __name__ == "__main__":
    main(WAYS)
