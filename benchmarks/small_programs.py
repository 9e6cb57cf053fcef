"""Two hundred small training programs, made of a table.

A program is a structure (what is trained, and by which loss) on a network, with an optimizer and a precision. Each of
the 20 structures meets each of the 10 networks; optimizers and precisions are dealt in turn. A structure is a function
from a `Program` to its models, its optimizers, its step, and a function that draws the arguments of a call.
"""

from __future__ import annotations

import copy
import functools

import torch
from small_networks import CLASSES, NETWORKS, OPTIMIZERS, PRECISIONS, ROWS
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it


def _one_loss(loss, *, outputs=CLASSES, target="labels", clip=0.0):
    """Return the structure of one network with a head and a loss."""

    def structure(p):
        model = nn.Sequential(p.net(), p.head(outputs))
        optimizer = p.optimizer(model)

        def step(x, y):
            optimizer.zero_grad()
            with p.amp():
                value = loss(model(x).float() if p.dtype != torch.float64 else model(x), y)
            value.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            return value

        return model, optimizer, step, lambda: (p.x(), getattr(p, target)())

    return structure


def _accumulated(p):
    model = nn.Sequential(p.net(), p.head())
    optimizer, number = p.optimizer(model), iter(range(10**6))

    def step(x, y, update):
        with p.amp():
            loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return model, optimizer, step, lambda: (p.x(), p.labels(), next(number) % 2 == 1)


def _mean_teacher(p):
    model, head = p.net(), p.head()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = p.optimizer(model, head)

    def step(x, y, jitter):
        with p.amp():
            ours = model(x)
            with torch.no_grad():
                theirs = teacher(x + 0.1 * jitter)
            loss = F.cross_entropy(head(ours), y) + F.mse_loss(ours, theirs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        return loss

    return [model, head, teacher], optimizer, step, lambda: (p.x(), p.labels(), p.noise(ROWS, *p.shape))


def _distilled(p):
    teacher, model = nn.Sequential(p.net(), p.head()).eval(), nn.Sequential(p.net(), p.head())
    optimizer = p.optimizer(model)

    def step(x, y):
        with p.amp():
            with torch.no_grad():
                soft = F.softmax(teacher(x) / 2, -1)
            logits = model(x)
            loss = F.kl_div(F.log_softmax(logits / 2, -1), soft, reduction="batchmean") * 4
            loss = loss + F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, logits

    return [model, teacher], optimizer, step, lambda: (p.x(), p.labels())


def _pairs(loss, inputs):
    """Return the structure of one network that embeds several inputs, whose embeddings are compared."""

    def structure(p):
        model = p.net()
        optimizer = p.optimizer(model)

        def step(*given):
            with p.amp():
                value = loss(*[model(one) if one.shape[1:] == p.shape else one for one in given])
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return model, optimizer, step, lambda: inputs(p)

    return structure


def _info_nce(a, b):
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    return F.cross_entropy(a @ b.t() / 0.1, torch.arange(ROWS))


def _autoencoder(p):
    encoder, mean, spread, decoder = p.net(), p.head(4), p.head(4), p.to_input()
    optimizer = p.optimizer(encoder, mean, spread, decoder)

    def step(x):
        with p.amp():
            hidden = encoder(x)
            mu, logvar = mean(hidden), spread(hidden)
            again = decoder(mu + torch.randn_like(mu) * torch.exp(0.5 * logvar))
            loss = F.mse_loss(again, x) - 0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [encoder, mean, spread, decoder], optimizer, step, lambda: (p.x(),)


def _masked(p):
    encoder, decoder = p.net(), nn.Sequential(p.head(4), p.to_input())
    optimizer = p.optimizer(encoder, decoder)

    def step(x):
        with p.amp():
            kept = (torch.rand_like(x) > 0.3).to(x.dtype)
            loss = ((decoder(encoder(x * kept)) - x).square() * (1 - kept)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return [encoder, decoder], optimizer, step, lambda: (p.x(),)


def _gan(p):
    made, judge = p.to_input(), nn.Sequential(p.net(), p.head(1))
    of_judge, of_made = p.optimizer(judge), p.optimizer(made)
    loss = F.binary_cross_entropy_with_logits

    def step(x, noise):
        yes, no = torch.ones(ROWS, 1, dtype=p.dtype), torch.zeros(ROWS, 1, dtype=p.dtype)
        judge.zero_grad()
        with p.amp():
            real = loss(judge(x), yes)
        real.backward()
        with p.amp():
            fake = made(noise)
            false = loss(judge(fake.detach()), no)
        false.backward()
        of_judge.step()
        made.zero_grad()
        with p.amp():
            fooled = loss(judge(fake), yes)
        fooled.backward()
        of_made.step()
        return real + false, fooled

    return [made, judge], [of_made, of_judge], step, lambda: (p.x(), p.noise())


def _wasserstein(p):
    made, judge = p.to_input(), nn.Sequential(p.net(), p.head(1))
    of_judge, of_made = p.optimizer(judge), p.optimizer(made)

    def step(x, noises):
        for noise in noises.unbind(0):
            with p.amp():
                loss = judge(made(noise).detach()).mean() - judge(x).mean()
            of_judge.zero_grad()
            loss.backward()
            of_judge.step()
            with torch.no_grad():
                for parameter in judge.parameters():
                    parameter.clamp_(-0.1, 0.1)
        with p.amp():
            fooled = -judge(made(noises[0])).mean()
        of_made.zero_grad()
        fooled.backward()
        of_made.step()
        return loss, fooled

    return [made, judge], [of_made, of_judge], step, lambda: (p.x(), p.noise(3, ROWS, 4))


def _adapted(p):
    """One inner step of gradient descent on the head, through which the outer loss is differentiated."""
    model, head = p.net(), p.head()
    optimizer = p.optimizer(model, head)

    def step(x, y, x_2, y_2):
        with p.amp():
            inner = F.cross_entropy(head(model(x)), y)
            (slope,) = torch.autograd.grad(inner, [head.weight], create_graph=True)
            loss = F.cross_entropy(F.linear(model(x_2), head.weight - 0.1 * slope, head.bias), y_2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return inner, loss

    return [model, head], optimizer, step, lambda: (p.x(), p.labels(), p.x(), p.labels())


def _actor_critic(p):
    model, policy, value = p.net(), p.head(), p.head(1)
    optimizer = p.optimizer(model, policy, value)
    modules = [model, policy, value]

    def step(x, actions, returns):
        with p.amp():
            hidden = model(x)
            logs, worth = F.log_softmax(policy(hidden), -1), value(hidden).squeeze(1)
            gain = returns - worth.detach()
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            entropy = -(logs.exp() * logs).sum(1).mean()
            chosen = logs.gather(1, actions[:, None]).squeeze(1)
            loss = -(chosen * gain).mean() + 0.5 * F.mse_loss(worth, returns) - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([one for module in modules for one in module.parameters()], 0.5)
        optimizer.step()
        return loss, entropy

    return modules, optimizer, step, lambda: (p.x(), p.labels(), p.noise(ROWS))


def _q_learning(p):
    model = nn.Sequential(p.net(), p.head())
    target = copy.deepcopy(model)
    optimizer = p.optimizer(model)

    def step(x, x_2, actions, rewards):
        with p.amp():
            with torch.no_grad():
                wanted = rewards + 0.99 * target(x_2).max(1).values
            loss = F.smooth_l1_loss(model(x).gather(1, actions[:, None]).squeeze(1), wanted.to(p.dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.data.copy_(0.1 * fast.data + 0.9 * slow.data)
        return loss

    return [model, target], optimizer, step, lambda: (p.x(), p.x(), p.labels(), p.noise(ROWS))


def _soft_actor_critic(p):
    actor, critics = nn.Sequential(p.net(), p.head(2)), nn.ModuleList([nn.Sequential(p.net(), p.head(2)) for _ in "ab"])
    of_actor, of_critics = p.optimizer(actor), p.optimizer(critics)

    def step(x, rewards):
        with p.amp():
            loss = sum(F.mse_loss(critic(x).sum(1), rewards) for critic in critics)
        of_critics.zero_grad()
        loss.backward()
        of_critics.step()
        with p.amp():
            action = torch.tanh(actor(x))
            worth = torch.min(*[(critic(x) * action).sum(1) for critic in critics])
            gained = -(worth - 0.2 * action.square().sum(1)).mean()
        of_actor.zero_grad()
        gained.backward()
        of_actor.step()
        return loss, gained

    return [actor, critics], [of_actor, of_critics], step, lambda: (p.x(), p.noise(ROWS))


def _two_tasks(p):
    model, first, second = p.net(), p.head(), p.head(1)
    weights = nn.ParameterList([nn.Parameter(torch.zeros((), dtype=p.dtype)) for _ in "ab"])
    optimizer, of_heads = p.optimizer(model, weights), p.optimizer(first, second)

    def step(x, y, z):
        with p.amp():
            hidden = model(x)
            losses = F.cross_entropy(first(hidden), y), F.mse_loss(second(hidden).squeeze(1), z)
            loss = sum(torch.exp(-w) * one + w for w, one in zip(weights, losses, strict=True))
        loss.backward()
        for one in (optimizer, of_heads):
            one.step()
            one.zero_grad()
        return loss, losses

    return [model, first, second, weights], [optimizer, of_heads], step, lambda: (p.x(), p.labels(), p.noise(ROWS))


STRUCTURES = {
    "classify": _one_loss(F.cross_entropy),
    "smoothed": _one_loss(functools.partial(F.cross_entropy, label_smoothing=0.1), clip=1.0),
    "regress": _one_loss(lambda out, y: F.smooth_l1_loss(out.squeeze(1), y.to(out.dtype)), outputs=1, target="coins"),
    "binary": _one_loss(
        lambda out, y: F.binary_cross_entropy_with_logits(out.squeeze(1), y.to(out.dtype)), outputs=1, target="coins"
    ),
    "margin": _one_loss(F.multi_margin_loss),
    "accumulated": _accumulated,
    "mean-teacher": _mean_teacher,
    "distilled": _distilled,
    "siamese": _pairs(
        lambda a, b, y: F.cosine_embedding_loss(a, b, y, margin=0.2), lambda p: (p.x(), p.x(), 2 * p.coins() - 1)
    ),
    "triplet": _pairs(F.triplet_margin_loss, lambda p: (p.x(), p.x(), p.x())),
    "contrast": _pairs(_info_nce, lambda p: (p.x(), p.x())),
    "autoencoder": _autoencoder,
    "masked": _masked,
    "gan": _gan,
    "wasserstein": _wasserstein,
    "adapted": _adapted,
    "actor-critic": _actor_critic,
    "q-learning": _q_learning,
    "soft-actor-critic": _soft_actor_critic,
    "two-tasks": _two_tasks,
}


def programs():
    """Return the name of each program, and what it is made of."""
    optimizers, found = list(OPTIMIZERS), {}
    for row, structure in enumerate(STRUCTURES):
        for column, network in enumerate(NETWORKS):
            number = row * len(NETWORKS) + column
            optimizer = optimizers[(number + row) % len(optimizers)]
            precision = PRECISIONS[(number + row // 3) % len(PRECISIONS)]
            found[f"{structure}/{network}/{optimizer}/{precision}"] = structure, network, optimizer, precision
    return found
