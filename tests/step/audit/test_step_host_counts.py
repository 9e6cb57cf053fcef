"""What a step decides on the host by a number that it counts, or draws; and sparse products: declined, and then cured."""

from __future__ import annotations

import pytest
import torch
from step_programs import Both, Classifier, batches, engines
from torch import nn
from torch.nn import functional as F

from hotloop.step.audit.host_side import on_host
from hotloop.testing.captured import CaptureForbiddenError, Tape


@pytest.fixture
def cpu():
    with engines("cpu"):
        yield Both("cpu")


def training(make, **settings):
    """Return a program whose model computes its loss itself, and keeps what it counts in its buffers."""

    def program(run):
        model = make().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-5, fused=True)

        @run.loop(model, optimizer, **settings).step
        def train_step(x, y):
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device, 24):
            run.note(train_step(x, y))
        return model, optimizer

    return program


class Queue(nn.Module):
    """Keys of earlier steps in a ring; its position is read on the host, as MoCo does."""

    def __init__(self):
        super().__init__()
        self.net = Classifier()
        self.register_buffer("queue", torch.zeros(24, 4))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x, y):
        keys = self.net(x)
        loss = F.cross_entropy(keys, y) + (keys @ self.queue.clone().T).square().mean()
        self.enqueue(keys.detach()[:, :4])
        return loss

    def enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[ptr : ptr + len(keys)] = keys
        self.queue_ptr[0] = (ptr + len(keys)) % len(self.queue)


class QueueOnTheDevice(Queue):
    def enqueue(self, keys):
        queue, ptr, n = self.queue, self.queue_ptr, len(keys)
        queue.index_copy_(0, (ptr + torch.arange(n, device=ptr.device)) % len(queue), keys)
        ptr.add_(n).remainder_(len(queue))


class Dropping(nn.Module):
    """Layers that are left out by a draw on the host."""

    def __init__(self, share):
        super().__init__()
        self.net, self.layer, self.layerdrop = Classifier(), nn.Linear(8, 8), share

    def forward(self, x, y):
        if torch.rand(()) < self.layerdrop:
            return F.cross_entropy(self.net(x), y)
        return F.cross_entropy(self.net(self.layer(x)), y)


class DroppingNone(Dropping):
    def forward(self, x, y):
        if self.layerdrop > 0 and torch.rand(()) < self.layerdrop:
            return F.cross_entropy(self.net(x), y)
        return F.cross_entropy(self.net(self.layer(x)), y)


class DroppingOnTheDevice(Dropping):
    def forward(self, x, y):
        keep = (torch.rand((), device=x.device) >= self.layerdrop).to(x.dtype)
        return F.cross_entropy(self.net(x + keep * (self.layer(x) - x)), y)


@pytest.mark.parametrize(
    ("declined", "followed", "hint"),
    [
        (Queue, QueueOnTheDevice, "index_copy_"),
        (lambda: Dropping(0.0), lambda: DroppingNone(0.0), "where the share is 0"),
        (lambda: Dropping(0.5), lambda: DroppingOnTheDevice(0.5), "weight it"),
    ],
)
def test_a_number_that_decides_on_the_host_is_declined_and_its_remedy_works(cpu, declined, followed, hint):
    cpu.declines(training(declined), reason="a value is read on the host", hint=hint)
    cpu.equal(training(followed), exact=True, replays=14)


def test_the_ring_on_the_device_is_the_same_ring(cpu):
    (_, host), (_, device) = (cpu.run(training(make)) for make in (Queue, QueueOnTheDevice))
    torch.testing.assert_close(host[0]["state"]["queue"], device[0]["state"]["queue"], rtol=0.0, atol=0.0)
    assert host[0]["state"]["queue_ptr"] == device[0]["state"]["queue_ptr"]


class Graph(nn.Module):
    """A product with a sparse matrix, as in graph networks."""

    def __init__(self):
        super().__init__()
        self.net = Classifier()
        edges = torch.eye(6).roll(1, 0) * 0.5
        self.edges = edges.to_sparse().coalesce()
        rows, columns = self.edges.indices()
        for name, one in {"rows": rows, "columns": columns, "values": self.edges.values()}.items():
            self.register_buffer(name, one.clone(), persistent=False)

    def forward(self, x, y):
        return F.cross_entropy(self.net(torch.sparse.mm(self.edges, x)), y)


class GraphWrittenOut(Graph):
    def forward(self, x, y):
        rows, columns, values = self.rows, self.columns, self.values
        mixed = torch.zeros(6, x.shape[1], device=x.device).index_add(0, rows, values[:, None] * x[columns])
        return F.cross_entropy(self.net(mixed), y)


def test_a_sparse_product_that_no_capture_allows_is_declined_and_its_remedy_works(cpu, monkeypatch):
    """On a GPU, cuSPARSE waits; here the recording refuses as CUDA does."""
    record = Tape.record

    def refuse(tape, operation, args, kwargs):
        if any(isinstance(one, torch.Tensor) and one.is_sparse for one in args):
            raise CaptureForbiddenError("CUDA error: operation not permitted when stream is capturing")
        return record(tape, operation, args, kwargs)

    monkeypatch.setattr(Tape, "record", refuse)
    cpu.declines(training(Graph), reason="when stream is capturing", hint="cuSPARSE, which synchronises")
    cpu.equal(training(GraphWrittenOut), exact=True, replays=14)
    same = [make()(*next(iter(batches(torch.device("cpu"), 1)))) for make in (seeded(Graph), seeded(GraphWrittenOut))]
    torch.testing.assert_close(*same)


def seeded(make):
    def made():
        torch.manual_seed(0)
        return make()

    return made


# -- what lies on the host in the stand-in -----------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, scale, use):
        super().__init__()
        self.net, self.use = Classifier(), use
        self.scale = scale

    def forward(self, x, y):
        return F.cross_entropy(self.use(self.net(x), self.scale), y)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, scale: x * scale,
        lambda x, scale: x * (scale * 2).exp(),
        lambda x, scale: x * scale.to(x.device),
        lambda x, scale: torch.where(x > 0, x, scale),
        lambda x, scale: x + torch.zeros_like(x).copy_(scale),
    ],
)
def test_a_tensor_said_to_be_on_the_host_is_found_where_it_meets_the_device(cpu, use):
    def program(run):
        return training(lambda: Scaled(on_host(torch.tensor(0.5)), use))(run)

    told = cpu.declines(program, reason="on the host that is no argument meets the device")
    assert "register_buffer" in told.hint
    cpu.equal(training(lambda: Scaled(on_host(torch.tensor(0.5)).clone(), use)), exact=True, replays=14)


def test_beside_a_tensor_on_the_host_others_are_on_the_device(cpu):
    kept = on_host(torch.tensor(0.5))
    use = lambda x, scale: x * scale + torch.tensor([0.5, 0.25]).sum() + torch.arange(3).sum()  # noqa: E731
    cpu.equal(training(lambda: Scaled(torch.tensor(0.5), use)), exact=True, replays=14)
    assert kept == 0.5
