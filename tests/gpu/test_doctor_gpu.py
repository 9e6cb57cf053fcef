"""The doctor where there is a GPU: how busy it is, what waits for it, and the machine as it is."""

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


def test_small_kernels_leave_the_device_idle(document):
    (found,) = kinds(document, "host_bound")
    assert 0 < found["busy"] < 0.7
    assert found["kernels"] > 100
    assert "host_bound" in [advice["rule"] for advice in document["advice"]]


def test_reads_and_copies_to_the_host_have_their_line_and_their_wait(document):
    waits = {event["line"]: event for event in kinds(document, "host_sync")}
    assert set(waits) == {line_of("READ"), line_of("COPY")}
    assert all(event["seconds"] > 0 for event in waits.values())


def test_the_loss_is_what_is_left_eager_by_its_share_of_the_kernels(document):
    """Over 4,096 classes, so that its kernels are more than the 1% of the device's time from which a part is told of."""
    parts = {event["part"]: event for event in kinds(document, "eager_part")}
    assert parts["loss"]["line"] == line_of("LOSS")
    assert 0 < parts["loss"]["share"] < 0.9
    assert "head" not in parts


def test_peaks_are_known_of_each_way(document):
    for figures in document["measurements"]["ways"].values():
        assert figures["peak_bytes"] > 20 * 64 * 64 * 4
    assert document["environment"]["device_memory_bytes"] > 2**30


ADVICE = """
import torch, torch.nn.functional as F, hotloop
from torch.nn.attention import SDPBackend, sdpa_kernel

class Attending(torch.nn.Module):
    def __init__(self, width=512, heads=8):
        super().__init__()
        self.heads, self.qkv, self.out = heads, torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
    def forward(self, x, kernel):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if kernel == "manual":
            made = torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v  # MANUAL
        elif kernel == "math":
            with sdpa_kernel(SDPBackend.MATH):
                made = F.scaled_dot_product_attention(q, k, v)  # MATH
        else:
            made = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(made.transpose(1, 2).flatten(2))

class Model(torch.nn.Module):
    def __init__(self, words):
        super().__init__()
        self.tokens = torch.nn.Embedding(words, 512)
        self.attending, self.head = Attending(), torch.nn.Linear(512, words, bias=False)
    def forward(self, x, kernel):
        return self.head(self.attending(self.tokens(x), kernel))

def program(words=32000, kernel="", half=True, length=1024):
    model = Model(words).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    def step(x, y):
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = F.cross_entropy(model(x, kernel).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    batches = [tuple(torch.randint(0, words, (8, length), device="cuda") for _ in range(2))] * 4
    return hotloop.Workload(model, optimizer, step, batches)

def right():
    return program()
def odd_words():
    return program(words=32003)
def single():
    return program(half=False)
def math():
    return program(words=2048, kernel="math", length=2048)  # the device takes longer than the host, whose time hides it
def manual():
    return program(words=2048, kernel="manual")
"""
ADVISED = ("odd_size", "tf32_off", "autocast_off", "slower_attention", "slower_layout", "argument_checks")


@pytest.fixture
def advice(tmp_path):
    """Return a function that examines a program of `ADVICE`, and returns what it could have in another form."""
    precision = torch.get_float32_matmul_precision()
    path = tmp_path / "advice.py"
    path.write_text(ADVICE)

    def of(name):
        found = examine(f"{path}:{name}", preset="none", steps=12)["advice"]
        return {(one["rule"], one["kind"]): one for one in found if one["rule"] in ADVISED}

    yield of
    torch.set_float32_matmul_precision(precision)


def test_a_program_that_has_what_it_could_is_told_nothing(advice):
    assert advice("right") == {}


def test_a_vocabulary_that_is_no_multiple_of_64_is_told_with_its_gain(advice):
    found = advice("odd_words")
    assert set(found) == {("odd_size", "vocabulary")}
    (told,) = found.values()
    assert told["milliseconds"] > 0
    assert "nn.Linear(512, 32064, ...)" in told["change"]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="needs TF32 and bfloat16"
)
def test_float32_is_told_of_tf32_and_autocast(advice):
    found = advice("single")
    assert {("tf32_off", "tf32_off"), ("autocast_off", "autocast_off")} <= set(found)
    assert all("numerics" in one["change"] for one in found.values())
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("name", "kind"), [("math", "kernels"), ("manual", "manual")])
def test_a_slow_form_of_attention_is_told_with_its_line(advice, name, kind):
    found = advice(name)
    assert ("slower_attention", kind) in found
    assert set(found) <= {("slower_attention", kind), ("tf32_off", "tf32_off")}  # the math kernel computes in float32
    lines = ADVICE.splitlines()
    assert lines[found["slower_attention", kind]["line"] - 1].endswith(f"# {name.upper()}")


def test_this_machine_compiles_on_its_gpu():
    machine = gathering.gather()
    assert [trial.device for trial in machine.trials] == ["cpu", "cuda"]
    assert [trial.reason for trial in machine.trials] == ["", ""]
    assert machine.driver_cuda is not None
    assert machine.gpus[0].multiprocessors > 0
    assert not [one for one in judge(machine) if one.level == "problem"]
    assert Path(machine.compiler).exists()
