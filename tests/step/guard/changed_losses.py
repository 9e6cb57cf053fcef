"""Scripts whose loss changes: weights, temperatures, schedules, teachers, targets, curricula."""

from __future__ import annotations

import argparse
import copy
import functools
import math
import types

import numpy as np
import torch
from changed_programs import Gpt, Mlp, Vae, adamw, language_loss, tokens
from torch import nn
from torch.nn import functional as F

EPOCH = 0
REAL_LABEL = 0.875
L1 = 0.0
LAST_LOSSES: dict[str, float] = {}


def kl_annealing():
    model, beta = Vae(), 0.0

    def loss(x, _):
        out, mean, spread = model(x)
        kl = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return F.mse_loss(out, x) + beta * kl

    yield model, loss
    beta = 0.5
    yield
    beta = 1.0


class CyclicalAnnealer:
    def __init__(self, cycle=4):
        self.cycle, self.count = cycle, 1

    @property
    def beta(self):
        return min(1.0, 2 * (self.count % self.cycle) / self.cycle)

    def step(self):
        self.count += 1


def cyclical_annealing():
    model, annealer = Vae(), CyclicalAnnealer()

    def loss(x, _):
        out, mean, spread = model(x)
        return F.mse_loss(out, x) - annealer.beta * (1 + spread - mean.square() - spread.exp()).mean()

    yield model, loss
    annealer.step()
    yield
    annealer.step()
    annealer.step()


def free_bits():
    model, config = Vae(), {"loss": {"free_bits": 0.5}}

    def loss(x, _):
        out, mean, spread = model(x)
        kl = -0.5 * (1 + spread - mean.square() - spread.exp()).mean(0)
        return F.mse_loss(out, x) + kl.clamp(min=config["loss"]["free_bits"]).sum()

    yield model, loss
    config["loss"]["free_bits"] = 0.0


def distillation():
    model, teacher = Mlp(), Mlp(32).eval()
    args = argparse.Namespace(alpha=0.5, temperature=4.0)

    def loss(x, y):
        out = model(x)
        with torch.no_grad():
            taught = teacher(x)
        soft = F.kl_div(
            F.log_softmax(out / args.temperature, -1), F.softmax(taught / args.temperature, -1), reduction="batchmean"
        )
        return args.alpha * args.temperature**2 * soft + (1 - args.alpha) * F.cross_entropy(out, y)

    yield model, loss
    args.temperature = 2.0
    yield
    args.alpha = 0.1


def teacher_swapped():
    model, teacher = Mlp(), Mlp(32)

    def loss(x, y):
        with torch.no_grad():
            soft = teacher(x).softmax(-1)
        return F.cross_entropy(model(x), soft)

    yield model, loss
    teacher = copy.deepcopy(model)
    yield
    teacher.load_state_dict(model.state_dict())


def teacher_joins_an_ensemble():
    model, teachers = Mlp(), [Mlp(8)]

    def loss(x, y):
        with torch.no_grad():
            soft = torch.stack([one(x).softmax(-1) for one in teachers]).mean(0)
        return F.cross_entropy(model(x), soft)

    yield model, loss
    teachers.append(Mlp(12))


def label_smoothing_ends():
    model, criterion = Mlp(), nn.CrossEntropyLoss(label_smoothing=0.25)
    yield model, lambda x, y: criterion(model(x), y)
    criterion.label_smoothing = 0.0


def class_weights_from_validation():
    model, criterion = Mlp(), nn.CrossEntropyLoss(weight=torch.ones(4))
    yield model, lambda x, y: criterion(model(x), y)
    criterion.weight = torch.tensor([1.0, 2.0, 0.5, 1.0])
    yield
    criterion.weight.mul_(torch.tensor([1.0, 0.5, 4.0, 1.0]))


def class_weights_in_numpy():
    model, counts = Mlp(), np.ones(4, dtype=np.float32)

    def loss(x, y):
        return F.cross_entropy(model(x), y, weight=torch.as_tensor(counts.sum() / counts))

    yield model, loss
    counts[1] = 5
    yield
    counts = np.array([1, 2, 3, 4], dtype=np.float32)


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0, reduction="mean"):
        super().__init__()
        self.gamma, self.reduction = gamma, reduction

    def forward(self, logits, target):
        nll = F.cross_entropy(logits, target, reduction="none")
        loss = (1 - (-nll).exp()) ** self.gamma * nll
        return loss.mean() if self.reduction == "mean" else loss.sum()


def focal_loss():
    model, criterion = Mlp(), FocalLoss()
    yield model, lambda x, y: criterion(model(x), y)
    criterion.gamma = 1.0
    yield
    criterion.reduction = "sum"


def loss_function_swapped():
    model, criterion = Mlp(), nn.CrossEntropyLoss()
    yield model, lambda x, y: criterion(model(x), y)
    criterion = nn.MultiMarginLoss()
    yield
    criterion = FocalLoss()


def multi_task_weights():
    model, weights = Mlp(), {"classes": 1.0, "size": 0.25}

    def loss(x, y):
        out = model(x)
        losses = {"classes": F.cross_entropy(out, y), "size": out.square().mean()}
        return sum(weights[name] * one for name, one in losses.items())

    yield model, loss
    weights["size"] = 1.0
    yield
    weights.update(classes=0.5, size=0.5)


def dynamic_weight_average():
    model, history = Mlp(), [[1.0, 1.0]]

    def loss(x, y):
        out = model(x)
        rates = [now / before for now, before in zip(history[-1], history[max(0, len(history) - 2)], strict=True)]
        total = sum(math.exp(rate) for rate in rates)
        a, b = (2 * math.exp(rate) / total for rate in rates)
        return a * F.cross_entropy(out, y) + b * out.abs().mean()

    yield model, loss
    history.append([0.5, 1.0])
    yield
    history.append([0.5, 0.25])


def uncertainty_weights_thaw():
    model = Mlp()
    model.log_vars = nn.Parameter(torch.zeros(2), requires_grad=False)

    def loss(x, y):
        out = model(x)
        losses = torch.stack([F.cross_entropy(out, y), out.square().mean()])
        return (losses * (-model.log_vars).exp() + model.log_vars).sum()

    yield model, loss
    model.log_vars.requires_grad_(True)


def auxiliary_loss_after_warmup():
    global EPOCH
    EPOCH = 0
    model = Mlp()

    def loss(x, y):
        out = model(x)
        total = F.cross_entropy(out, y)
        if EPOCH >= 2:
            total = total + 0.5 * model.features(x).square().mean()
        return total

    yield model, loss
    EPOCH = 1
    yield
    EPOCH = 2


def deep_supervision():
    model, weights = Gpt(), [1.0, 0.5]

    def loss(x, _):
        ids, total = tokens(x), 0.0
        hidden = model.embed(ids)
        for block, weight in zip(model.blocks, weights, strict=True):
            hidden = block(hidden)
            if weight != 0:
                total = total + weight * language_loss(model.head(hidden), ids)
        return total

    yield model, loss
    weights[:] = [one * 0.5 for one in weights]
    yield
    weights[0] = 0


def sigmoid_rampup(current, length):
    return 1.0 if length == 0 else math.exp(-5.0 * (1.0 - min(current, length) / length) ** 2)


def mean_teacher_rampup():
    model, teacher, epoch = Mlp(), Mlp(), 0
    args = argparse.Namespace(consistency=8.0, rampup=4)

    def loss(x, y):
        out = model(x + torch.randn_like(x) / 8)
        with torch.no_grad():
            taught = teacher(x)
        return F.cross_entropy(out, y) + args.consistency * sigmoid_rampup(epoch, args.rampup) * F.mse_loss(out, taught)

    yield model, loss
    epoch = 2
    yield
    epoch = 4


def pseudo_labels():
    model = Mlp()
    config = types.SimpleNamespace(semi=types.SimpleNamespace(threshold=0.5, weight=1.0))

    def loss(x, y):
        out = model(x)
        sure, label = out.detach().softmax(-1).max(-1)
        taught = F.cross_entropy(out, label, reduction="none") * (sure > config.semi.threshold)
        return F.cross_entropy(out, y) + config.semi.weight * taught.mean()

    yield model, loss
    config.semi.threshold = 0.25
    yield
    config.semi = types.SimpleNamespace(threshold=0.5, weight=0.25)


class NtXent(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature, self.mask = temperature, None
        self.build(6)

    def build(self, size):
        self.mask = torch.eye(size, dtype=torch.bool)

    def forward(self, one, other):
        alike = F.normalize(one) @ F.normalize(other).T / self.temperature
        return alike.masked_fill(self.mask, -1e4).logsumexp(-1).mean() - (alike * self.mask).sum(-1).mean()


def contrastive_temperature():
    model, criterion = Mlp(), NtXent(0.5)
    yield model, lambda x, y: criterion(model(x), model(x + 0.125))
    criterion.temperature = 0.25
    yield
    criterion.mask = criterion.mask.roll(1, 0)


def triplet_margin():
    model, criterion = Mlp(), nn.TripletMarginLoss(margin=1.0)
    yield model, lambda x, y: criterion(model(x), model(x + 0.125), model(x.flip(0)))
    criterion.margin = 0.25


class ArcFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.s = 8.0
        self.set_margin(0.0)

    def set_margin(self, margin):
        self.cos_m, self.sin_m = math.cos(margin), math.sin(margin)

    def forward(self, features, y):
        cosine = F.linear(F.normalize(features), F.normalize(self.weight)).clamp(-0.99, 0.99)
        moved = cosine * self.cos_m - (1 - cosine.square()).sqrt() * self.sin_m
        return F.cross_entropy(self.s * torch.where(y[:, None] == torch.arange(4), moved, cosine), y)


def arcface_margin():
    model = Mlp()
    model.arc = ArcFace()
    yield model, lambda x, y: model.arc(model(x), y)
    model.arc.set_margin(0.5)
    yield
    model.arc.s = 16.0


def gan_with_real_label():
    global REAL_LABEL
    REAL_LABEL = 0.875
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.25), nn.Linear(8, 1))
    opt_g, opt_d = adamw(generator.parameters()), adamw(critic.parameters(), betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()

    def train_step(x, _):
        opt_d.zero_grad()
        fake = generator(torch.randn(6, 4))
        real_label = torch.full((6, 1), REAL_LABEL)
        loss_d = bce(critic(x), real_label) + bce(critic(fake.detach()), torch.zeros(6, 1))
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = bce(critic(fake), torch.ones(6, 1))
        loss_g.backward()
        opt_g.step()
        return torch.stack([loss_d.detach(), loss_g.detach()])

    yield (generator, critic), (opt_g, opt_d), train_step
    REAL_LABEL = 1.0


def gan_losses_by_name():
    generator, critic, config = nn.Linear(4, 8), Mlp(), {"gan": "hinge"}
    opt_g, opt_d = adamw(generator.parameters()), adamw(critic.parameters())
    losses = {
        "hinge": lambda real, fake: F.relu(1 - real).mean() + F.relu(1 + fake).mean(),
        "wgan": lambda real, fake: fake.mean() - real.mean(),
    }

    def train_step(x, _):
        fake = generator(torch.randn(6, 4))
        loss_d = losses[config["gan"]](critic(x), critic(fake.detach()))
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        loss_g = -critic(fake).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        return loss_d.detach() + loss_g.detach()

    yield (generator, critic), (opt_g, opt_d), train_step
    config["gan"] = "wgan"


def gradient_penalty():
    critic, lambda_gp = Mlp(), 1.0

    def loss(x, _):
        mixed = x.lerp(x.flip(0), 0.5).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        return critic(x).mean() - critic(-x).mean() + lambda_gp * (slope.norm(2, 1) - 1).square().mean()

    yield critic, loss
    lambda_gp = 10.0


class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.p_uncond, self.min_snr = Mlp(), 0.0, None
        self.set_betas(torch.linspace(0.01, 0.5, 8))

    def set_betas(self, betas):
        self.register_buffer("alphas", (1 - betas).cumprod(0))

    def forward(self, x, y):
        t = torch.randint(8, (len(x),))
        a, noise = self.alphas[t][:, None], torch.randn_like(x)
        keep = (torch.rand(len(x), 1) >= self.p_uncond).float()
        out = self.net((a.sqrt() * x + (1 - a).sqrt() * noise) * keep)
        snr = a / (1 - a)
        weight = snr.clamp(max=self.min_snr) / snr if self.min_snr else 1.0
        return (weight * (out - noise[:, :4]).square()).mean()


def diffusion_guidance():
    model = Diffusion()
    yield model, lambda x, y: model(x, y)
    model.p_uncond = 0.5
    yield
    model.min_snr = 5.0


def diffusion_noise_schedule():
    model = Diffusion()
    yield model, lambda x, y: model(x, y)
    model.set_betas(torch.linspace(0.1, 0.25, 8))


def scheduled_sampling():
    model = Gpt()
    model.sampling = types.SimpleNamespace(p=0.0)

    def loss(x, _):
        ids = tokens(x)
        with torch.no_grad():
            said = model(ids).argmax(-1).roll(1, 1)
        mixed = torch.where(torch.rand(ids.shape) < model.sampling.p, said, ids)
        return language_loss(model(mixed), ids)

    yield model, loss
    model.sampling.p = 0.25
    yield
    model.sampling.p = 0.75


def mixup_ratio():
    model, mixing = Mlp(), {"lam": 1.0}
    draws = np.random.default_rng(0)

    def loss(x, y):
        lam = mixing["lam"]
        out = model(lam * x + (1 - lam) * x.flip(0))
        return lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y.flip(0))

    yield model, loss
    mixing["lam"] = draws.beta(0.5, 0.5)
    yield
    mixing["lam"] = draws.beta(0.5, 0.5)


def hard_example_mining():
    model, keep = Mlp(), 1.0

    def loss(x, y):
        each = F.cross_entropy(model(x), y, reduction="none")
        return each.topk(int(len(each) * keep)).values.mean()

    yield model, loss
    keep = 0.5


def curriculum_by_length():
    model, curriculum = Gpt(), types.SimpleNamespace(lengths=[4, 6, 8], stage=0)

    def loss(x, _):
        ids = tokens(x)[:, : curriculum.lengths[curriculum.stage]]
        return language_loss(model(ids), ids)

    yield model, loss
    curriculum.stage += 1
    yield
    curriculum.stage += 1


def noisy_labels_remapped():
    model, remap = Mlp(), {0: 0, 1: 1, 2: 2, 3: 3}

    def loss(x, y):
        table = torch.tensor([remap[k] for k in range(4)])
        return F.cross_entropy(model(x), table[y])

    yield model, loss
    remap[3] = 2


class Noise:
    def __init__(self, magnitude):
        self.magnitude = magnitude

    def __call__(self, x):
        return x + self.magnitude * torch.randn_like(x)


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


def augmentation_grows():
    model, augment = Mlp(), Compose([Noise(0.125)])
    yield model, lambda x, y: F.cross_entropy(model(augment(x)), y)
    augment.transforms[0].magnitude = 0.5
    yield
    augment.transforms.append(lambda x: x.flip(1))


def sparsity_after_warmup():
    global L1
    L1 = 0.0
    model = Mlp()

    def loss(x, y):
        total = F.cross_entropy(model(x), y)
        return total + L1 * sum(p.abs().sum() for p in model.parameters()) if L1 else total

    yield model, loss
    L1 = 0.125


def ewc_after_a_task():
    model, tasks = Mlp(), []

    def loss(x, y):
        total = F.cross_entropy(model(x), y)
        for fisher, anchor in tasks:
            for name, p in model.named_parameters():
                total = total + (fisher[name] * (p - anchor[name]).square()).sum()
        return total

    yield model, loss
    anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
    tasks.append(({name: torch.ones_like(p) for name, p in anchor.items()}, anchor))


def prototypes_from_validation():
    model, prototypes = Mlp(), {k: torch.randn(4) for k in range(4)}

    def loss(x, y):
        centres = torch.stack([prototypes[k] for k in sorted(prototypes)])
        return F.cross_entropy(-torch.cdist(model(x), centres), y)

    yield model, loss
    prototypes[2] = torch.zeros(4)
    yield
    prototypes[0].fill_(1.0)


def ppo_clip_range():
    model, old = Mlp(), Mlp()
    agent = types.SimpleNamespace(progress=1.0, clip_range=lambda left: 0.25 * left, entropy=0.125)

    def loss(x, y):
        logs, before = model(x).log_softmax(-1), old(x).detach().log_softmax(-1)
        ratio = (logs - before).gather(1, y[:, None]).exp()
        eps = agent.clip_range(agent.progress)
        gain = torch.min(ratio * x[:, :1], ratio.clamp(1 - eps, 1 + eps) * x[:, :1])
        return -gain.mean() + agent.entropy * (logs.exp() * logs).sum(-1).mean()

    yield model, loss
    agent.progress = 0.25
    yield
    agent.entropy = 0.0


def dqn_target_network():
    online, gamma = Mlp(), 0.5
    target = copy.deepcopy(online)

    def loss(x, y):
        with torch.no_grad():
            goal = x[:, 0] + gamma * target(x.flip(0)).max(1).values
        return F.smooth_l1_loss(online(x).gather(1, y[:, None])[:, 0], goal)

    yield online, loss
    target.load_state_dict(online.state_dict())
    yield
    target, gamma = copy.deepcopy(online), 0.75


class RunningMeanStd:
    def __init__(self):
        self.mean, self.var, self.count = 0.0, 1.0, 1e-4

    def update(self, mean, var, count):
        whole = self.count + count
        self.mean, self.var = self.mean + (mean - self.mean) * count / whole, var
        self.count = whole


def normalised_rewards():
    model, stats = Mlp(), RunningMeanStd()

    def loss(x, y):
        reward = (x[:, 0] - stats.mean) / math.sqrt(stats.var + 1e-8)
        return -(reward * model(x).log_softmax(-1).gather(1, y[:, None])[:, 0]).mean()

    yield model, loss
    stats.update(0.5, 2.0, 32)
    yield
    stats.update(-0.5, 4.0, 32)


def gumbel_temperature():
    model, gumbel = Mlp(), functools.partial(F.gumbel_softmax, tau=2.0, hard=False)
    yield model, lambda x, y: (gumbel(model(x)) * x[:, :4]).mean()
    gumbel.keywords["tau"] = 0.5
    yield
    gumbel = functools.partial(F.gumbel_softmax, tau=0.5, hard=True)


def z_loss_and_softcap():
    model = Gpt()
    model.config = types.SimpleNamespace(softcap=None, z_loss=0.0)

    def loss(x, _):
        ids = tokens(x)
        logits = model(ids)
        if model.config.softcap is not None:
            logits = model.config.softcap * (logits / model.config.softcap).tanh()
        return language_loss(logits, ids) + model.config.z_loss * logits.logsumexp(-1).square().mean()

    yield model, loss
    model.config.softcap = 4.0
    yield
    model.config.z_loss = 0.25


def ignored_token():
    model, pad = Gpt(), -100
    yield model, lambda x, y: language_loss(model(tokens(x)), tokens(x), ignore_index=pad)
    pad = 0


def loss_weights_by_recent_losses():
    LAST_LOSSES.clear()
    model = Mlp()

    def loss(x, y):
        out = model(x)
        total = F.cross_entropy(out, y)
        if LAST_LOSSES.get("validation", 1.0) < 0.5:
            total = total + out.square().mean()
        return total

    yield model, loss
    LAST_LOSSES["validation"] = 0.75
    yield
    LAST_LOSSES["validation"] = 0.25
