"""Programs with one fault each, as users write them; the line at fault carries a mark."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hotloop


class Net(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = torch.nn.Linear(8, width)
        self.head = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def forward(self, x):
        return self.head(self.body(x))


class Broken(Net):
    def forward(self, x):
        hidden = self.body(x)
        if hidden.sum().item() > 1e9:  # BREAK
            hidden = hidden * 2
        return self.head(hidden)


def workload(model, step=None, sizes=(4, 4, 4, 4), **others):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def plain(x, y):
        loss = F.mse_loss(model(x), y)  # LOSS
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batches = [(torch.randn(size, 8), torch.randn(size, 1)) for size in sizes]
    chosen = plain if step is None else step(model, optimizer)
    return hotloop.Workload(model, optimizer, chosen, batches, **others)


class Branched(Net):
    """A network of which one of two heads is trained, by the higher-order operator that compilers know."""

    def __init__(self):
        super().__init__()
        self.other = torch.nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.body(x)
        return torch.cond(hidden.sum() > 0, lambda one: self.head(one), lambda one: self.other(one), (hidden,))  # noqa: PLW0108


def clean():
    return workload(Net())


def idle():
    """A step that forgets its optimizer's step."""

    def of(model, optimizer):
        def step(x, y):
            F.mse_loss(model(x), y).backward()
            optimizer.zero_grad()

        return step

    return workload(Net(), of)


def branched():
    return workload(Branched())


def breaks():
    return workload(Broken())


def long_epoch():
    """An epoch whose last batch is smaller, and comes after the examined steps."""
    return workload(Net(), sizes=(*[4] * 50, 3))


def short_epoch():
    """The eager steps take all batches but the last, which is smaller."""
    return workload(Net(), sizes=(4, 4, 3))


def used_up():
    """Batches that can be read once, and the eager steps read them all."""
    whole = workload(Net(), sizes=[4] * 5)
    return hotloop.Workload(whole.model, whole.optimizer, whole.step, iter(whole.batches))


def bypassed():
    def of(model, optimizer):
        def step(x, y):
            F.mse_loss(model.forward(x), y).backward()  # FORWARD
            optimizer.step()
            optimizer.zero_grad()

        return step

    return workload(Net(), of)


def reads():
    def of(model, optimizer):
        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen = loss.item() + float(loss.detach())  # READ
            print("targets", y, seen)  # PRINT
            return x[y[:, 0] > 0]  # SIZE

        return step

    return workload(Net(), of)


def scaled(fused=False):
    def of(model, optimizer):
        optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu")

        def step(x, y):
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)  # SCALER
            scaler.update()
            optimizer.zero_grad()
            return scaler.get_scale()  # SCALE

        return step

    return workload(Net(), of)


def scaled_and_fused():
    return scaled(fused=True)


def checkpointed():
    def of(model, optimizer):
        def step(x, y):
            out = checkpoint(model, x, use_reentrant=False)  # CHECKPOINT
            F.mse_loss(out, y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return workload(Net(), of)


def head_left():
    """The program compiles a part itself, and leaves the head eager."""

    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = Net(), torch.nn.Linear(1, 20_000)

        def forward(self, x):
            return self.head(self.body(x))  # HEAD

    def of(model, optimizer):
        def step(x, y):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    model = Wide()
    model.body.compile(backend="aot_eager")
    return workload(model, of)


def wrapped():
    return workload(torch.compile(Net(), backend="aot_eager"))


def parts():
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(8, 8), "head": torch.nn.Linear(8, 1)})

    def of(model, optimizer):
        def step(x, y):
            F.mse_loss(model["head"](model["body"](x)), y).backward()
            optimizer.step()

        return step

    return workload(model, of)


def fails_in_the_third():
    count = [0]

    def of(model, optimizer):
        def step(x, y):
            count[0] += 1
            if count[0] == 3:
                raise KeyError("their own")
            model(x).sum().backward()

        return step

    return workload(Net(), of)


def no_model():
    return hotloop.Workload("a model", torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), print, [1])


def no_batch():
    return workload(Net(), sizes=())


def no_workload():
    return Net()


def raises():
    raise SystemExit("made")


def two_models():
    models = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)]
    optimizers = [torch.optim.SGD(one.parameters()) for one in models]

    def step(x, y):
        F.mse_loss(models[1](models[0](x)), y).backward()
        for one in optimizers:
            one.step()

    return hotloop.Workload(models, optimizers, step, workload(Net()).batches)
