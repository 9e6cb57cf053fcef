"""Programs that torch.compile was reported to train wrongly, and the same wrong results to plant in `aot_eager`.

Each part is the smallest training program around the pattern of one report upstream (pytorch/pytorch issues).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop._torch import backends
from hotloop.step.prove import schedule

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 8


class Modulated(nn.Module):
    """Two chained LayerNorms whose scales and shifts are chunks of one table, as in DiT and Wan."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.table = nn.Parameter(torch.randn(1, 4, WIDTH) / math.sqrt(WIDTH))

    def forward(self, x):
        parts = self.table.chunk(4, dim=1)
        for number, norm in enumerate(self.norms):
            shift, scale = parts[2 * number], parts[2 * number + 1]
            x = x + (norm(x) * (1 + scale) + shift)
        return x


class Diagonal(nn.Module):
    """A loss with a penalty: the sum of a learned matrix whose diagonal is learned by itself."""

    def __init__(self):
        super().__init__()
        self.matrix, self.line = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x.square().mean() + torch.diagonal_scatter(self.matrix, self.line).sum()


class Sliced(nn.Module):
    """A loss with a penalty: the sum of a learned matrix whose first rows are learned by themselves."""

    def __init__(self):
        super().__init__()
        self.matrix, self.rows = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x):
        return x.square().mean() + torch.slice_scatter(self.matrix, self.rows, dim=0, start=0, end=2).sum()


class Moments(nn.Module):
    """An offset in a buffer that follows the input by Adam's step, whose count is read on the host."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(WIDTH))
        self.register_buffer("second", torch.zeros(WIDTH))
        self.register_buffer("offset", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.follow(x.detach().mean((0, 1)))
        return x - self.offset

    @torch.no_grad()
    def follow(self, mean):
        self.count.add_(1)
        self.first.mul_(0.9).add_(mean, alpha=0.1)
        self.second.mul_(0.999).addcmul_(mean, mean, value=0.001)
        count = self.count.item()
        spread = (self.second.sqrt() / ((1 - 0.999**count) ** 0.5)).add_(1e-8)
        self.offset.addcdiv_(self.first, spread, value=-(0.1 / (1 - 0.9**count)))


class Clamped(nn.Module):
    """A clamp to a limit that the program passes as a number, and moves."""

    def forward(self, x, limit):
        return x.clamp(-limit, limit)


class Scheduled(nn.Module):
    """A residual that is weighted by a number that the program passes, and moves."""

    def forward(self, x, weight):
        return x + weight * torch.tanh(x)


class OverQueries(nn.Module):
    """Attention whose softmax is over the queries, as in slot attention."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        query, key, value = (
            one(x).unflatten(-1, (2, -1)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        weights = torch.softmax(torch.matmul(query, key.transpose(-2, -1)).div(2.0), dim=-2)
        return torch.matmul(weights, value).transpose(1, 2).flatten(2)


class Volume(nn.Module):
    """An adaptive max pool of a volume in the memory format that torch recommends for convolutions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(1, 4, 3, padding=1)

    def forward(self, x):
        y = self.conv(x.unflatten(-1, (2, 4)).unsqueeze(1)).contiguous(memory_format=torch.channels_last_3d)
        return F.adaptive_max_pool3d(y, (4, 1, 4)).flatten(1).unflatten(1, (8, WIDTH))


class Dropped(nn.Module):
    """A layer with dropout, whose memory torch is told to halve."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(torch.relu(self.layer(x)))


class InPlace(nn.Module):
    """A function of its own with a right backward, whose forward writes into its result."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x, scale)
            made = x * scale
            made += 1
            return made

        @staticmethod
        def backward(ctx, gradient):
            x, scale = ctx.saved_tensors
            return gradient * scale, (gradient * x).sum((0, 1))

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.Function.apply(x, self.scale)


class Net(nn.Module):
    """A layer, the part in question, and a head, unless the part returns a number."""

    def __init__(self, part):
        super().__init__()
        self.first, self.act, self.part, self.last = nn.Linear(WIDTH, WIDTH), nn.Tanh(), part, nn.Linear(WIDTH, 3)

    def forward(self, x, *numbers):
        x = self.part(self.act(self.first(x)), *numbers)
        return x if x.ndim == 0 else self.last(x).mean(1)


def moving(step):
    """Return a number that is another one at each step."""
    return 0.02 * (1 + step)


def workload(part, *, steps=6, number=moving):
    """Return the training program of a part."""
    torch.manual_seed(0)
    model = Net(part())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(x, y, *numbers):
        made = model(x, *numbers)
        loss = made if made.ndim == 0 else F.cross_entropy(made, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    draws = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 8, WIDTH, generator=draws), torch.randint(3, (4,), generator=draws)) for _ in range(steps)]
    if part in (Clamped, Scheduled):
        data = [(*batch, number(step)) for step, batch in enumerate(data)]
    return hotloop.Workload(model, optimizer, train_step, data)


class Trained:
    """A program trained in a loop, eagerly if it is told no tier."""

    def __init__(self, part, run=None, *, steps, before=None, number=moving):
        program = workload(part, steps=steps, number=number)
        self.model = program.model
        self.loop = hotloop.Loop(program.model, program.optimizer, run=run) if run else None
        step = self.loop.step(program.step) if self.loop is not None else program.step
        with hotloop.watch() as self.events:
            for step_number, batch in enumerate(program.batches):
                if before is not None:
                    before(step_number)
                step(*batch)

    def told(self, kind):
        return [one for one in self.events if isinstance(one, kind)]

    def left(self):
        return self.model.state_dict()


@contextlib.contextmanager
def checked_every(steps):
    """Let a step in every so many be checked, whatever that costs."""

    def planned(self, seconds, _usual, **_):
        self.spent += seconds
        self._left, self._doubling, self.every = steps, math.inf, steps

    with mock.patch.object(schedule.Schedule, "checked", planned), mock.patch.object(schedule, "FIRST", steps):
        yield


def compiled_wrongly(part, backend="inductor"):
    """Return whether this torch's own `torch.compile` gives a program other results or gradients than eager."""

    def made(compiled):
        program = workload(part)
        model = torch.compile(program.model, backend=backend) if compiled else program.model
        for x, y, *numbers in program.batches:
            torch.manual_seed(2)
            model.zero_grad()
            result = model(x, *numbers)
            (result if result.ndim == 0 else F.cross_entropy(result, y)).backward()
            yield torch.cat(
                [result.detach().flatten(), *(one.grad.flatten() for one in model.parameters() if one.grad is not None)]
            )

    with torch._inductor.config.patch(fallback_random=True):
        pairs = zip(made(False), made(True), strict=True)
        apart = [((one - other).norm() / one.norm()).item() for one, other in pairs]
    torch.compiler.reset()
    return max(apart) > 1e-3


# -- the same wrong results, planted ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Fault:
    """A wrong result: what `wrong` makes of an operation's arguments, in graphs of a backward pass or in all.

    Args:
        operation: its name in torch; ``number`` stands for each number of Python's that a graph is given.
        wrong: takes the right result, the operation's arguments and a dictionary that lasts as long as the graph.
    """

    operation: str
    wrong: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    backward: bool = True
    on: bool = True


def _never_written(table, _, kept):
    """The second norm's half of the table's gradient is never written: the memory holds the last step's."""
    last = kept.get("last", torch.zeros_like(table))
    kept["last"] = table.clone()
    return torch.cat([table[:, :2], last[:, 2:]], dim=1) if table.shape == (1, 4, WIDTH) else table


def _first_number(number, _, kept):
    """The number of the call that the graph was compiled in, at each call."""
    return kept.setdefault("first", number.clone())


def _over_keys(_, args, __):
    return torch.softmax(args[0], -1)


def _over_keys_backward(_, args, __):
    return torch.ops.aten._softmax_backward_data(args[0], args[1], -1, args[3])


def _read_as_contiguous(_, args, __):
    gradient, x, indices = args
    other = indices.permute(0, 2, 3, 4, 1).contiguous().view(indices.shape)
    return torch.ops.aten.adaptive_max_pool3d_backward(gradient, x, other)


def _zeros(right, _, __):
    return torch.zeros_like(right)


def _is_number(node, value):
    """Return whether dynamo passes a number of Python's here: as a tensor, so that it need not compile for each."""
    return (
        node.op == "placeholder"
        and isinstance(value, torch.Tensor)
        and value.dtype == torch.float64
        and value.ndim == 0
    )


@contextlib.contextmanager
def planted(faults):
    """Plant faults in what aot_eager compiles while the block runs; yield how often each was computed."""
    from torch._dynamo.backends.common import aot_autograd

    wrong = []

    def compiler(backward, graph):
        here = {fault.operation: (fault, {}) for fault in faults if backward or not fault.backward}

        class Wrong(torch.fx.Interpreter):
            def run_node(self, node):
                right = super().run_node(node)
                name = "number" if _is_number(node, right) else str(getattr(node.target, "overloadpacket", ""))
                if name not in here:
                    return right
                fault, kept = here[name]
                kept = kept.setdefault(node.name, {})
                spoilt = fault.wrong(right, self.fetch_args_kwargs_from_env(node)[0], kept)
                wrong.append(name)
                return spoilt if fault.on else right

        def run(args):
            given = list(args)
            args.clear()
            return Wrong(graph).run(*given)

        run._boxed_call = True
        return run

    forward, back = ((lambda graph, _, backward=backward: compiler(backward, graph)) for backward in (False, True))
    made = aot_autograd(fw_compiler=forward, bw_compiler=back, inference_compiler=forward)
    with mock.patch.object(backends, "aot_eager", return_value=made):
        yield wrong


def faults_of(part):
    """Return the wrong results that a report describes, new and on."""
    return {
        Modulated: lambda: [Fault("aten.cat", _never_written)],
        Diagonal: lambda: [Fault("aten.diagonal_scatter", _zeros)],
        Sliced: lambda: [Fault("aten.slice_scatter", _zeros)],
        Scheduled: lambda: [Fault("number", _first_number, backward=False)],
        OverQueries: lambda: [
            Fault("aten._softmax", _over_keys, backward=False),
            Fault("aten._softmax_backward_data", _over_keys_backward),
        ],
        Volume: lambda: [Fault("aten.adaptive_max_pool3d_backward", _read_as_contiguous)],
    }[part]()
