"""Scripts whose loop changes: optimizers, clipping, averages, settings, callbacks, trainers."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import enum
import itertools
import math
import os
import types
from typing import NamedTuple

import torch
from changed_programs import Cnn, Gpt, Mlp, adamw, language_loss, sgd, tokens, usual_step
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F

LEARNING_RATE = 2**-5
constants = types.ModuleType("constants")


def classified(model):
    return lambda x, y: F.cross_entropy(model(x), y)


def stepping(model, optimizer, before=lambda: None, after=lambda: None):
    """The usual step with something between backward and update, and after it."""

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        before()
        optimizer.step()
        after()
        return loss.detach()

    return model, optimizer, train_step


def clipping_by_recent_norms():
    model, recent = Mlp(), collections.deque([1.0], maxlen=3)
    optimizer = adamw(model.parameters())

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 1.25 * sum(recent) / len(recent))

    yield stepping(model, optimizer, clip)
    recent.append(0.125)
    yield
    recent.extend([0.0625, 0.0625])


def clipping_of_another_kind():
    model, grad_clip = Mlp(), {"kind": "norm", "value": 0.5}
    optimizer = adamw(model.parameters())

    def clip():
        if grad_clip["kind"] == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), grad_clip["value"])
        elif grad_clip["kind"] == "value":
            nn.utils.clip_grad_value_(model.parameters(), grad_clip["value"])

    yield stepping(model, optimizer, clip)
    grad_clip.update(kind="value", value=0.03125)
    yield
    grad_clip["kind"] = None


def adaptive_clipping():
    model = Cnn()
    optimizer, args = sgd(model.parameters()), argparse.Namespace(agc=1.0, eps=1e-3)

    def clip():
        for p in model.parameters():
            limit = p.detach().norm().clamp(min=args.eps) * args.agc
            p.grad.mul_((limit / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))

    yield stepping(model, optimizer, clip)
    args.agc = 0.125


def gradient_noise():
    model, eta = Mlp(), 0.125
    optimizer = adamw(model.parameters())

    def noise():
        if eta:
            for p in model.parameters():
                p.grad.add_(torch.randn_like(p), alpha=eta)

    yield stepping(model, optimizer, noise)
    eta = 0.03125
    yield
    eta = 0.0


def warm_restarts():
    model = Mlp()
    optimizer = sgd(model.parameters(), momentum=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    yield stepping(model, optimizer)
    scheduler.step()
    yield
    scheduler.step()


def learning_rate_in_the_loss():
    model = Mlp()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def loss(x, y):
        return F.cross_entropy(model(x), y) + scheduler.get_last_lr()[0] * model(x).square().mean()

    yield model, optimizer, usual_step(loss, optimizer)
    scheduler.step()


def weight_decay_by_learning_rate():
    model = Mlp()
    optimizer = sgd(model.parameters())

    def decay():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - group["lr"] * 0.125)

    yield stepping(model, optimizer, decay)
    optimizer.param_groups[0]["lr"] = 2**-3


def momentum_and_decay_edited():
    model = Mlp()
    optimizer = sgd(model.parameters(), momentum=0.5)
    yield stepping(model, optimizer)
    for group in optimizer.param_groups:
        group["momentum"] = 0.75
    yield
    optimizer.param_groups[0]["weight_decay"] = 0.125


def discriminative_learning_rates():
    model = Mlp()
    optimizer = adamw([{"params": model.first.parameters(), "lr": 0.0}, {"params": model.last.parameters()}])
    yield stepping(model, optimizer)
    optimizer.param_groups[0]["lr"] = 2**-8
    yield
    optimizer.param_groups[0]["lr"] = 2**-6


def optimizer_state_cleared():
    model = Mlp()
    optimizer = adamw(model.parameters())
    yield stepping(model, optimizer)
    optimizer.state.clear()
    yield
    for state in optimizer.state.values():
        state["exp_avg_sq"].mul_(4)


def optimizer_swapped():
    model = Mlp()
    first, second = adamw(model.parameters()), sgd(model.parameters())
    optimizer = first

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    yield model, (first, second), train_step
    optimizer = second


def optimizer_made_anew():
    model = Mlp()
    optimizer = adamw(model.parameters())

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    yield model, optimizer, train_step
    optimizer = sgd(model.parameters())


def optimizer_of_ones_own():
    global LEARNING_RATE
    LEARNING_RATE = 2**-5
    model, unused = Mlp(), adamw([nn.Parameter(torch.zeros(1))])

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.sub_(LEARNING_RATE * grad.sign())
        return loss.detach()

    yield model, unused, train_step
    LEARNING_RATE = 2**-7


def lookahead():
    model, slow = Mlp(), {}
    optimizer, settings = adamw(model.parameters()), {"alpha": 0.5, "on": False}

    def sync():
        if settings["on"]:
            for name, p in model.named_parameters():
                slow[name].lerp_(p.detach(), settings["alpha"])
                p.data.copy_(slow[name])

    yield stepping(model, optimizer, after=sync)
    slow.update({name: p.detach().clone() for name, p in model.named_parameters()})
    settings["on"] = True
    yield
    settings["alpha"] = 0.75


class Ema:
    def __init__(self, model, decay):
        self.decay, self.shadow = decay, copy.deepcopy(model).requires_grad_(False)

    def state_dict(self):
        return self.shadow.state_dict()

    def load_state_dict(self, state):
        self.shadow.load_state_dict(state)

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.shadow.parameters(), model.parameters(), strict=True):
            mine.mul_(self.decay).add_(theirs, alpha=1 - self.decay)


def ema_decay_warmup():
    model = Mlp()
    ema, optimizer = Ema(model, 0.5), adamw(model.parameters())
    model_ema, optimizer, step = stepping(model, optimizer, after=lambda: ema.update(model))
    yield (model_ema, ema.shadow), optimizer, step
    ema.decay = 0.75
    yield
    ema.decay = 0.875


def swa_starts():
    model = Mlp()
    average, optimizer, epoch = copy.deepcopy(model), adamw(model.parameters()), 0

    @torch.no_grad()
    def update():
        if epoch >= 2:
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.25)

    yield (model, average), optimizer, stepping(model, optimizer, after=update)[2]
    epoch = 1
    yield
    epoch = 2


def accumulated_over_more():
    model, accumulation = Mlp(), 1
    optimizer = sgd(model.parameters())

    def train_step(x, y):
        optimizer.zero_grad()
        total = 0.0
        for part, label in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
            loss = F.cross_entropy(model(part), label) / accumulation
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    yield model, optimizer, train_step
    accumulation = 2
    yield
    accumulation = 3


def sharpness_aware():
    model, rho = Mlp(), 0.0625
    optimizer = sgd(model.parameters())

    def train_step(x, y):
        F.cross_entropy(model(x), y).backward()
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                moved.append(rho * p.grad.sign())
                p.add_(moved[-1])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.sub_(by)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    yield model, optimizer, train_step
    rho = 0.25


def loss_scale_backs_off():
    model, scaler = Mlp(), types.SimpleNamespace(scale=2.0**16)
    optimizer = sgd(model.parameters())

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        (loss.bfloat16() * scaler.scale).backward()
        for p in model.parameters():
            p.grad.div_(scaler.scale).add_(1 / scaler.scale)
        optimizer.step()
        return loss.detach()

    yield model, optimizer, train_step
    scaler.scale *= 2.0**-12


def momentum_of_ones_own():
    model, buffers = Mlp(), {}
    optimizer = sgd(model.parameters())
    for name, p in model.named_parameters():
        buffers[name] = torch.zeros_like(p)

    def smooth():
        for name, p in model.named_parameters():
            p.grad.copy_(buffers[name].mul_(0.5).add_(p.grad))

    yield stepping(model, optimizer, smooth)
    buffers.update({name: torch.zeros_like(one) for name, one in buffers.items()})
    yield
    for one in buffers.values():
        one.zero_()


class Phase(enum.Enum):
    WARMUP = "warmup"
    FINETUNE = "finetune"


def phases():
    model, phase = Mlp(), Phase.WARMUP

    def loss(x, y):
        features = model.features(x)
        return F.cross_entropy(model.last(features.detach() if phase is Phase.WARMUP else features), y)

    yield model, loss
    phase = Phase.FINETUNE


@dataclasses.dataclass
class LossConfig:
    weight: float = 1.0
    extra: dict = dataclasses.field(default_factory=lambda: {"l2": 0.0})


@dataclasses.dataclass(frozen=True)
class Config:
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    bias: bool = True


def dataclass_settings():
    model, config = Mlp(), Config()

    def loss(x, y):
        out = model(x) if config.bias else model(x) - model.last.bias
        return config.loss.weight * F.cross_entropy(out, y) + config.loss.extra["l2"] * out.square().mean()

    yield model, loss
    config = dataclasses.replace(config, bias=False)
    yield
    config.loss.extra["l2"] = 0.5


class Hyper(NamedTuple):
    weight: float = 1.0
    names: tuple = ("last",)


def named_tuple_settings():
    model, hyper = Mlp(), Hyper()

    def loss(x, y):
        decay = sum(p.square().sum() for n, p in model.named_parameters() if n.split(".")[0] in hyper.names)
        return hyper.weight * F.cross_entropy(model(x), y) + decay

    yield model, loss
    hyper = hyper._replace(names=("first", "last"))
    yield
    hyper = Hyper(weight=0.5)


def omegaconf_settings():
    model, cfg = Gpt(), OmegaConf.create({"loss": {"weight": 1.0, "z": 0.0}, "double": "${loss.weight}"})

    def loss(x, _):
        logits = model(tokens(x))
        return cfg.double * language_loss(logits, tokens(x)) + cfg.loss.z * logits.square().mean()

    yield model, loss
    cfg.loss.z = 0.5
    yield
    OmegaConf.update(cfg, "loss.weight", 0.25)


class AttributeDict(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


def attribute_dict_settings():
    model, hparams = Mlp(), AttributeDict(alpha=1.0, optim=AttributeDict(l2=0.0))

    def loss(x, y):
        out = model(x)
        return hparams.alpha * F.cross_entropy(out, y) + hparams.optim.l2 * out.square().mean()

    yield model, loss
    hparams.alpha = 0.5
    yield
    hparams["optim"]["l2"] = 0.25


class TrainConfig:
    weight = 1.0
    smoothing = 0.0


def class_settings():
    TrainConfig.weight, TrainConfig.smoothing = 1.0, 0.0
    model = Mlp()

    def loss(x, y):
        return TrainConfig.weight * F.cross_entropy(model(x), y, label_smoothing=TrainConfig.smoothing)

    yield model, loss
    TrainConfig.smoothing = 0.25
    yield
    TrainConfig.weight = 0.5


def module_of_constants():
    constants.ALPHA, constants.TABLE = 1.0, [1.0, 0.0]
    model = Mlp()

    def loss(x, y):
        out = model(x)
        return constants.ALPHA * F.cross_entropy(out, y) + constants.TABLE[1] * out.square().mean()

    yield model, loss
    constants.ALPHA = 0.5
    yield
    constants.TABLE[1] = 0.5


def parsed_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--mixup", action="store_true")
    args, model = parser.parse_args([]), Mlp()

    def loss(x, y):
        if args.mixup:
            x = (x + x.flip(0)) / 2
        return vars(args)["alpha"] * F.cross_entropy(model(x), y)

    yield model, loss
    args.alpha = 0.5
    yield
    args = parser.parse_args(["--mixup"])


def environment():
    os.environ.pop("USE_AUXILIARY", None)
    model = Mlp()

    def loss(x, y):
        out = model(x)
        extra = out.square().mean() if os.environ.get("USE_AUXILIARY", "0") == "1" else 0.0
        return F.cross_entropy(out, y) + extra

    yield model, loss
    os.environ["USE_AUXILIARY"] = "1"
    yield
    del os.environ["USE_AUXILIARY"]


class Penalty:
    def __init__(self, weight):
        self.weight = weight

    def on_loss(self, trainer, loss, out):
        return loss + self.weight * out.square().mean()


class Trainer:
    def __init__(self, model, callbacks):
        self.model, self.optimizer, self.callbacks = model, adamw(model.parameters()), callbacks
        self.state = types.SimpleNamespace(epoch=0, global_step=0)
        self.loss_fn = nn.CrossEntropyLoss()

    def call(self, name, value, *rest):
        for callback in self.callbacks:
            if hasattr(callback, name):
                value = getattr(callback, name)(self, value, *rest)
        return value

    def compute_loss(self, x, y):
        out = self.model(x)
        return self.call("on_loss", self.loss_fn(out, y), out)

    def training_step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.compute_loss(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def callback_added():
    trainer = Trainer(Mlp(), [])
    yield trainer.model, trainer.optimizer, trainer.training_step
    trainer.callbacks.append(Penalty(0.5))
    yield
    trainer.callbacks[0].weight = 0.125


class EpochTrainer(Trainer):
    def compute_loss(self, x, y):
        return super().compute_loss(x, y) * (0.5 if self.state.epoch < 2 else 1.0)


def trainer_with_an_epoch():
    trainer = EpochTrainer(Mlp(), [])
    yield trainer.model, trainer.optimizer, trainer.training_step
    trainer.state.epoch = 1
    yield
    trainer.state.epoch = 2


def method_of_a_trainer_replaced():
    trainer = Trainer(Mlp(), [])
    yield trainer.model, trainer.optimizer, trainer.training_step
    trainer.compute_loss = lambda x, y: F.multi_margin_loss(trainer.model(x), y)
    yield
    trainer.compute_loss = lambda x, y: trainer.loss_fn(trainer.model(x), y) * 0.5


LOSSES = {}


def register(name):
    def put(function):
        LOSSES[name] = function
        return function

    return put


def registry_of_losses():
    LOSSES.clear()
    register("loss")(F.cross_entropy)
    model = Mlp()
    yield model, lambda x, y: sum(one(model(x), y) for one in LOSSES.values())

    @register("loss")
    def smoothed(out, y):
        return F.cross_entropy(out, y, label_smoothing=0.25)

    yield

    @register("penalty")
    def penalty(out, y):
        return out.square().mean()


class Controller:
    """A weight that a PID controller moves; read through a property with a setter."""

    def __init__(self):
        self._beta, self.total = 0.0, 0.0

    @property
    def beta(self):
        return self._beta

    @beta.setter
    def beta(self, value):
        self._beta = max(0.0, min(1.0, value))

    def observe(self, error):
        self.total += error
        self.beta = 0.5 * error + 0.25 * self.total


def controlled_weight():
    model, controller = Mlp(), Controller()
    yield model, lambda x, y: F.cross_entropy(model(x), y) + controller.beta * model(x).square().mean()
    controller.observe(0.5)
    yield
    controller.observe(-0.25)


def schedule_of_milestones():
    model, milestones, epoch = Mlp(), {0: 1.0, 10: 0.5, 20: 0.25}, 0

    def weight():
        return next(value for start, value in sorted(milestones.items(), reverse=True) if epoch >= start)

    yield model, lambda x, y: weight() * F.cross_entropy(model(x), y)
    epoch = 10
    yield
    milestones[10] = 0.125


def polynomial_schedule():
    model = Mlp()
    schedule = types.SimpleNamespace(step=0, total=8, power=2.0)

    def loss(x, y):
        share = (1 - min(schedule.step, schedule.total) / schedule.total) ** schedule.power
        return F.cross_entropy(model(x), y) + share * model(x).abs().mean()

    yield model, loss
    schedule.step += 4
    yield
    schedule.power = math.inf


def losses_by_turns():
    """A cycle in a script is advanced at validations, not in the step."""
    model, turns = Mlp(), itertools.cycle([F.cross_entropy, F.multi_margin_loss])
    now = next(turns)
    yield model, lambda x, y: now(model(x), y)
    now = next(turns)
