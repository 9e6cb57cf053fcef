"""The doctor where there is a GPU: what waits for it, and the machine as it is."""

from pathlib import Path

import pytest
import torch

from hotloop.prove.doctor import gathering
from hotloop.prove.doctor.examining import examine
from hotloop.prove.doctor.judging import judge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROGRAM = """
import torch, torch.nn.functional as F, hotloop

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(40)))
        self.head = torch.nn.Linear(64, 4096)
    def forward(self, x):
        return self.head(self.layers(x))

def make():
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    def step(x, y):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)  # LOSS
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = loss.item()  # READ
        kept = loss.detach().cpu()  # COPY
        return kept
    return hotloop.Workload(model, optimizer, step, [(torch.randn(256, 64), torch.randint(0, 4096, (256,)))] * 4)
"""


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("doctor") / "launches.py"
    path.write_text(PROGRAM)
    return examine(f"{path}:make", preset="default", steps=12)


def line_of(mark):
    return next(number for number, text in enumerate(PROGRAM.splitlines(), start=1) if text.endswith(f"# {mark}"))


def kinds(document, kind):
    return [event for event in document["events"] if event["kind"] == kind]


def test_reads_and_copies_to_the_host_have_their_line_and_their_wait(document):
    waits = {event["line"]: event for event in kinds(document, "host_sync")}
    assert set(waits) == {line_of("READ"), line_of("COPY")}
    assert all(event["seconds"] > 0 for event in waits.values())


def test_peaks_are_known_of_each_way(document):
    for figures in document["measurements"]["ways"].values():
        assert figures["peak_bytes"] > 20 * 64 * 64 * 4
    assert document["environment"]["device_memory_bytes"] > 2**30


def test_this_machine_compiles_on_its_gpu():
    machine = gathering.gather()
    assert [trial.device for trial in machine.trials] == ["cpu", "cuda"]
    assert [trial.reason for trial in machine.trials] == ["", ""]
    assert machine.gpus[0].memory_bytes > 0
    assert not [one for one in judge(machine) if one.level == "problem"]
    assert Path(machine.compiler).exists()
