"""One of the processes that `torchrun` has started is killed: ``torchrun killed_program.py capture|proof|replay``.

It is the second one: as its capture ends, between the two runs of a proof, or while it replays.
"""

import contextlib
import datetime as dt
import os
import signal
import sys
import threading
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hotloop
from hotloop.step.capture import engines
from hotloop.step.prove.graph_proofs import GraphProofs
from hotloop.testing import captured_step_emulation
from hotloop.testing.captured import TapeRecording

STEPS, REPLAYED = 60, 30
BACKEND = os.environ.get("PEERS_BACKEND", "gloo")


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def main(when):
    dist.init_process_group(BACKEND, timeout=dt.timedelta(seconds=60))
    rank, stack = dist.get_rank(), contextlib.ExitStack()
    device = torch.device("cpu") if BACKEND == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
    else:
        stack.enter_context(captured_step_emulation())
    recording = engines._CudaRecording if device.type == "cuda" else TapeRecording
    within = {"capture": (recording, "cut"), "proof": (GraphProofs, "candidate")}
    if rank == 1 and when in within:
        stack.enter_context(mock.patch.object(*within[when], kill))
    torch.manual_seed(1)
    with stack:
        net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).to(device)
        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loop = hotloop.Loop(model, optimizer, run="eager+graph", total_steps=1000, sentinel=0)

        @loop.step
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for number in range(STEPS):
            dies = (number, rank, when) == (REPLAYED, 1, "replay")
            if dies and device.type == "cuda":
                torch.cuda._sleep(2_000_000_000)  # about a second, for which the other one's replay waits
            if dies:
                threading.Timer(0.2, kill).start()
            step(torch.randn(4, 6, device=device))
            if dies:
                assert loop.last_ran() == ("eager+graph", "run"), loop.status()
                signal.pause()
    print("trained to the end", flush=True)


main(sys.argv[1])
