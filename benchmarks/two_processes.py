"""Two processes under a loop: the share of clean exits, and the cost of votes.

usage: python -m benchmarks.two_processes [--exits 20] [--votes 1000] [--backend gloo|nccl] [--out FILE]

Exits: so often two processes train under DDP with a loop, compiled, and leave in the order of
docs/how-to/distributed.md; an exit is clean where both end with 0. Votes: in one more pair, the seconds of a vote, of a
step that is compiled, and of the same step with the guard collectives of torch on. ``--backend nccl`` takes two GPUs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SECONDS = 180


def child(folder, rank, backend, votes):
    """Train, and leave in order, so that no object holds the group when it is destroyed; print JSON."""
    import torch
    from torch import distributed as dist

    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=2)
    print(json.dumps(trained(device, votes)), flush=True)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def trained(device, votes):
    """Train under DDP with a loop, and measure votes if asked to; all objects are gone afterwards."""
    import torch
    from torch import nn
    from torch.nn import functional as F  # noqa: N812 - torch's own custom
    from torch.nn.parallel import DistributedDataParallel

    import hotloop

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).to(device)
    model = DistributedDataParallel(net, device_ids=None if device.type == "cpu" else [device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = hotloop.Loop(model, optimizer, run="aot_eager")

    @loop.step
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = torch.randn(16, 64, device=device), torch.arange(16, device=device) % 8
    for _ in range(40):
        train_step(*batch)
    told = {"tier": loop.status().tier, **(measured(loop, train_step, batch, votes) if votes else {})}
    loop.close()
    return told


def measured(loop, train_step, batch, votes):
    """Return the median milliseconds of a vote, of a step between votes, and of one with guard collectives."""
    import torch

    from hotloop.step.ranks.votes import Vote

    def median(call, times):
        found = []
        for _ in range(times):
            begin = time.perf_counter()
            call()
            if batch[0].is_cuda:
                torch.cuda.synchronize()
            found.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(found)

    vote = median(lambda: loop.context.peers.agree(Vote.YES), votes)
    step = median(lambda: train_step(*batch), votes)
    before = torch.compiler.set_enable_guard_collectives(True)
    for _ in range(4):  # in a process's own pace: guards of both are compared from here on
        train_step(*batch)
    guarded = median(lambda: train_step(*batch), votes)
    torch.compiler.set_enable_guard_collectives(before)
    return {"vote_ms": vote, "step_ms": step, "step_with_guard_collectives_ms": guarded, "times": votes}


def pair(backend, votes=0):
    """Run two processes; return their exit codes and output."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.two_processes", "--folder", folder]
        more = ["--backend", backend, "--votes", str(votes)]
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
        running = [subprocess.Popen([*command, "--rank", str(rank), *more], **settings) for rank in range(2)]
        codes, told = [], []
        for one in running:
            try:
                out, error = one.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                one.kill()
                out, error = one.communicate()
            codes.append(one.returncode)
            told.append(json.loads(out.splitlines()[-1]) if out.strip() else {"error": error[-500:]})
    return codes, told


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exits", type=int, default=20, help="pairs of processes (%(default)s)")
    parser.add_argument("--votes", type=int, default=1_000, help="votes and steps that are timed (%(default)s)")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--out", type=pathlib.Path, help="where to write the result")
    parser.add_argument("--note", default="", help="what else a reader should know, as who shares the machine")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        child(given.folder, given.rank, given.backend, given.votes)
        return
    from benchmarks.suite import document as files

    document = {
        "date": files.today(),
        "command": f"python -m benchmarks.two_processes --backend {given.backend} --exits {given.exits}",
        "machine": files.machine("cpu" if given.backend == "gloo" else "cuda"),
        "note": given.note,
    }
    codes, told = pair(given.backend, given.votes)
    document["agreeing"] = told[0] | {"exit_codes": codes}
    print(json.dumps(document["agreeing"]), flush=True)
    document["exits"] = []
    for number in range(given.exits):
        codes, told = pair(given.backend)
        document["exits"].append(codes)
        print(f"[{number + 1}/{given.exits}] exit codes {codes}, tier {told[0].get('tier', told[0])}", flush=True)
    clean = sum(codes == [0, 0] for codes in document["exits"])
    document["clean"] = f"{clean} of {given.exits}"
    print(f"{document['clean']} ended cleanly")
    if given.out:
        given.out.write_text(files.text(document), encoding="utf-8")


if __name__ == "__main__":
    main()
