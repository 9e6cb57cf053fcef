"""Scripts whose numbers are kept where code finds them in other ways: in items, wrappers, functions of autograd, libraries."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import types

import attrs
import pydantic
import torch
from changed_programs import Gpt, Mlp, adamw, language_loss, sgd, tokens, usual_step
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

losses = types.ModuleType("losses")


def classified(model):
    return lambda x, y: F.cross_entropy(model(x), y)


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.scale = 1.0


class Stack(nn.Module):
    """Layers that a loop reads numbers of; `kind` says how they are held."""

    def __init__(self, kind=nn.ModuleList):
        super().__init__()
        self.layers, self.head = kind([Scaled() for _ in range(3)]), nn.Linear(8, 4)
        self.gains = [types.SimpleNamespace(value=1.0) for _ in range(3)]

    def forward(self, x):
        for layer in self.layers:
            x = x + layer.scale * layer(x).tanh()
        return self.head(x)


def numbers_of_layers():
    model = Stack()
    yield model, classified(model)
    model.layers[0].scale = 0.25
    yield
    model.layers[1].scale = 0.5


class Gained(Stack):
    def forward(self, x):
        for gain, layer in zip(self.gains, self.layers, strict=True):
            if hasattr(layer, "bypass"):
                continue
            x = x + gain.value * layer(x)
        return self.head(x)


def flags_of_layers():
    model = Gained()
    yield model, classified(model)
    model.layers[0].bypass = True
    yield
    model.gains[1].value = 0.5


class Summed(Stack):
    def forward(self, x):
        total = sum(layer.scale for layer in reversed(self.layers))
        return self.head(self.layers[0](x) * total)


def numbers_summed_over_layers():
    model = Summed()
    yield model, classified(model)
    model.layers[2].scale = 0.5


def layers_in_a_plain_list():
    model, stages = Mlp(), [Scaled(), Scaled()]

    def loss(x, y):
        for number, stage in enumerate(stages):
            x = x + stage.scale * (number + 1)
        return F.cross_entropy(model(x), y)

    yield model, loss
    stages[0].scale = 0.25


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleDict({"wide": Scaled(), "deep": Scaled()})
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(sum(one.scale * one(x) for name, one in self.branches.items()))


def branches_by_name():
    model = Branches()
    yield model, classified(model)
    model.branches["deep"].scale = 0.0


def penalties_of_modules():
    model = Stack()

    def loss(x, y):
        total = F.cross_entropy(model(x), y)
        for module in model.modules():
            if isinstance(module, nn.Linear) and getattr(module, "l2", 0):
                total = total + module.l2 * module.weight.square().sum()
        return total

    yield model, loss
    model.layers[1].l2 = 0.5
    yield
    model.head.l2 = 0.25


def attributes_of_parameters():
    model = Mlp()
    optimizer = sgd(model.parameters())
    for p in model.parameters():
        p.lr_scale = 1.0

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.mul_(p.lr_scale)
        optimizer.step()
        return loss.detach()

    yield model, optimizer, train_step
    model.first.weight.lr_scale = 0.25
    yield
    model.last.bias.lr_scale = 0.0


class Wrapper:
    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x)

    def __getattr__(self, name):
        return getattr(self.module, name)


def wrapped_model():
    model = Stack()
    wrapped = Wrapper(Wrapper(model))
    model.temperature = 1.0
    yield model, lambda x, y: F.cross_entropy(wrapped(x) / wrapped.temperature, y)
    wrapped.module.module.temperature = 2.0
    yield
    wrapped.temperature = 0.5


class Reverse(torch.autograd.Function):
    strength = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -Reverse.strength * grad


def gradient_reversal():
    Reverse.strength = 0.0
    model = Mlp()
    model.domain = nn.Linear(16, 4)

    def loss(x, y):
        features = model.features(x)
        return F.cross_entropy(model.last(features), y) + F.cross_entropy(model.domain(Reverse.apply(features)), y)

    yield model, loss
    Reverse.strength = 0.5
    yield
    Reverse.strength = 1.0


def checkpointed_blocks():
    model = Gpt()
    model.scale = 1.0

    def part(block, hidden):
        return block(hidden) * model.scale

    def loss(x, _):
        ids = tokens(x)
        hidden = model.embed(ids)
        for block in model.blocks:
            hidden = checkpoint(part, block, hidden, use_reentrant=False)
        return language_loss(model.head(hidden), ids)

    yield model, loss
    model.scale = 0.5


def functional_call_with_other_parameters():
    model = Mlp()
    fast = {"last.bias": torch.zeros(4)}

    def loss(x, y):
        return F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y) + F.cross_entropy(model(x), y)

    yield model, loss
    fast["last.bias"] = torch.ones(4)
    yield
    fast["first.bias"] = torch.ones(16)


def vectorised_loss():
    model, margin = Mlp(), types.SimpleNamespace(value=1.0)

    def each(out, shift):
        return (out - shift).clamp(min=-margin.value).sum()

    yield model, lambda x, y: torch.vmap(each)(model(x), x[:, :4]).mean()
    margin.value = 0.25


def prior_replaced():
    model, prior = Mlp(), Normal(torch.tensor(0.0), torch.tensor(1.0), validate_args=False)
    yield model, lambda x, y: F.cross_entropy(model(x), y) - prior.log_prob(model(x)).mean()
    prior.scale = torch.tensor(2.0)
    yield
    prior = Normal(torch.tensor(1.0), torch.tensor(1.0), validate_args=False)


def context_replaced():
    model, context = Mlp(), contextlib.nullcontext()

    def loss(x, y):
        with context:
            out = model(x)
        return F.cross_entropy(out.float(), y)

    yield model, loss
    context = torch.autocast("cpu", dtype=torch.bfloat16)


def bound_methods_in_a_list():
    class Penalty:
        weight = 0.0

        def __call__(self, out):
            return self.weight * out.square().mean()

        def sharp(self, out):
            return self.weight * out.abs().max()

    model, penalty = Mlp(), Penalty()
    terms = [penalty.sharp]

    def loss(x, y):
        out = model(x)
        return F.cross_entropy(out, y) + sum(term(out) for term in terms)

    yield model, loss
    penalty.weight = 0.5
    yield
    terms.append(penalty)


def chained_terms():
    model = Mlp()
    first, second = [lambda out: out.square().mean()], []

    def loss(x, y):
        out = model(x)
        return F.cross_entropy(out, y) + sum(map(lambda term: term(out), itertools.chain(first, second)))  # noqa: C417

    yield model, loss
    second.append(lambda out: out.abs().mean())


def hook_that_is_a_partial():
    def scale(module, given, out, *, settings):
        return out * settings["scale"]

    model, settings = Mlp(), {"scale": 1.0}
    model.first.register_forward_hook(functools.partial(scale, settings=settings))
    yield model, classified(model)
    settings["scale"] = 0.5


class Optim(pydantic.BaseModel):
    weight: float = 1.0
    names: list[str] = ["first"]


class Settings(pydantic.BaseModel):
    optim: Optim = Optim()


def pydantic_settings():
    model, settings = Mlp(), Settings(optim=Optim())

    def loss(x, y):
        decay = sum(p.square().sum() for n, p in model.named_parameters() if n.split(".")[0] in settings.optim.names)
        return settings.optim.weight * F.cross_entropy(model(x), y) + decay

    yield model, loss
    settings.optim.weight = 0.5
    yield
    settings.optim.names.append("last")


@attrs.define
class Slotted:
    weight: float = 1.0
    inner: dict = attrs.Factory(lambda: {"z": 0.0})


def attrs_settings():
    model, settings = Mlp(), Slotted()

    def loss(x, y):
        out = model(x)
        return settings.weight * F.cross_entropy(out, y) + settings.inner["z"] * out.square().mean()

    yield model, loss
    settings.weight = 0.5
    yield
    settings.inner["z"] = 0.5


class BaseConfig:
    weight = 1.0


class DebugConfig(BaseConfig):
    pass


def inherited_settings():
    for name in ("weight", "extra"):
        if name in vars(DebugConfig):
            delattr(DebugConfig, name)
    model, config = Mlp(), DebugConfig()

    def loss(x, y):
        out = model(x)
        total = config.weight * F.cross_entropy(out, y)
        return total + out.square().mean() if getattr(config, "extra", False) else total

    yield model, loss
    DebugConfig.weight = 0.5
    yield
    DebugConfig.extra = True


def function_of_a_module_replaced():
    losses.compute = lambda out, y: F.cross_entropy(out, y)
    model = Mlp()
    yield model, lambda x, y: losses.compute(model(x), y)
    losses.compute = lambda out, y: F.multi_margin_loss(out, y)


def function_of_a_library_replaced():
    model, real = Mlp(), F.softplus

    def loss(x, y):
        return F.cross_entropy(model(x), y) + F.softplus(model(x)).mean()

    yield model, loss
    F.softplus = lambda x: F.relu(x)
    yield
    F.softplus = real


def static_method_replaced():
    class Objective:
        @staticmethod
        def weigh(loss):
            return loss

        def __call__(self, out, y):
            return self.weigh(F.cross_entropy(out, y))

    model, objective = Mlp(), Objective()
    yield model, lambda x, y: objective(model(x), y)
    Objective.weigh = staticmethod(lambda loss: loss * 0.5)


class WarmAdamW(torch.optim.AdamW):
    """An optimizer of the program's own around torch's."""

    boost = 1.0

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(self.boost * group.get("gain", 1.0))
        return super().step(closure)


def optimizer_subclass():
    model = Mlp()
    optimizer = WarmAdamW(model.parameters(), lr=2**-6, fused=True, betas=(0.5, 0.75))
    yield model, optimizer, usual_step(classified(model), optimizer)
    optimizer.boost = 0.25
    yield
    optimizer.param_groups[0]["gain"] = 4.0


def function_with_attributes():
    def penalty(out):
        return penalty.weight * out.square().mean()

    penalty.weight = 0.0
    model = Mlp()
    yield model, lambda x, y: F.cross_entropy(model(x), y) + penalty(model(x))
    penalty.weight = 0.5


def default_weights():
    model, weights = Mlp(), collections.defaultdict(lambda: 1.0)

    def loss(x, y, table=weights):
        out = model(x)
        return table["ce"] * F.cross_entropy(out, y) + table["l2"] * out.square().mean()

    weights["ce"], weights["l2"] = 1.0, 0.0
    yield model, loss
    weights["l2"] = 0.5


def loss_by_name_of_a_library():
    model, config = Mlp(), {"loss": "cross_entropy"}
    yield model, lambda x, y: getattr(F, config["loss"])(model(x), y)
    config["loss"] = "multi_margin_loss"


def temperature_parameter_frozen():
    model = Mlp()
    temperature = nn.Parameter(torch.ones(()))
    optimizer = adamw([*model.parameters(), temperature])
    yield model, optimizer, usual_step(lambda x, y: F.cross_entropy(model(x) * temperature, y), optimizer)
    temperature.requires_grad_(False)
    yield
    temperature.data.fill_(0.5)
