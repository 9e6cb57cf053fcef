"""Scripts whose model changes: layers, rates, adapters, norms, masks, exits, forwards."""

from __future__ import annotations

import copy
import random
import types

import torch
from changed_programs import Cnn, Gpt, GptBlock, Mlp, adamw, language_loss, tokens, usual_step
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

ACT2FN = {"relu": nn.ReLU(), "gelu": nn.GELU(), "silu": nn.SiLU()}


def classified(model):
    return lambda x, y: F.cross_entropy(model(x), y)


def written(model):
    return lambda x, y: language_loss(model(tokens(x)), tokens(x))


def dropout_schedule():
    model = Mlp(dropout=0.5)
    yield model, classified(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.25
    yield
    model.drop.p = 0.0


class StochasticDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop_rates = [0.0, 0.0, 0.0]

    def forward(self, x):
        x = self.stem(x)
        for block, rate in zip(self.blocks, self.drop_rates, strict=True):
            keep = 1 - rate
            shape = (x.shape[0],) + (1,) * (x.ndim - 1)
            x = x + block(x).tanh() * x.new_empty(shape).bernoulli_(keep) / keep
        return self.head(x)


def stochastic_depth_grows():
    model = StochasticDepth()
    yield model, classified(model)
    model.drop_rates = [0.25 * i / 2 for i in range(3)]
    yield
    model.drop_rates[2] = 0.5


def layers_dropped_by_a_set():
    model = Gpt(layers=3)
    model.active = {0, 1, 2}

    def loss(x, _):
        ids = tokens(x)
        hidden = model.embed(ids)
        for index, block in enumerate(model.blocks):
            if index in model.active:
                hidden = block(hidden)
        return language_loss(model.head(hidden), ids)

    yield model, loss
    model.active.discard(1)
    yield
    model.active = {1}


class EarlyExit(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.exits = nn.ModuleDict({str(i): nn.Linear(8, 4) for i in range(3)})
        self.exit_at, self.all_exits = 2, False

    def forward(self, x):
        outs = []
        for i, layer in enumerate(self.layers):
            x = layer(x).relu()
            if self.all_exits or i == self.exit_at:
                outs.append(self.exits[str(i)](x))
            if i == self.exit_at:
                break
        return torch.stack(outs).mean(0)


def early_exit():
    model = EarlyExit()
    yield model, classified(model)
    model.exit_at = 1
    yield
    model.all_exits = True


def batchnorm_momentum():
    model = Cnn()
    yield model, classified(model)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.5


def batchnorm_frozen():
    model = Cnn()
    yield model, classified(model)
    model.norm.eval()
    yield
    model.norm_2.eval().requires_grad_(False)


def batchnorm_without_statistics():
    model = Cnn()
    yield model, classified(model)
    model.norm.eps = 0.125
    yield
    model.norm_2 = nn.GroupNorm(2, 6)


def convert_to_instance_norm():
    model = nn.Sequential(Cnn())
    yield model, classified(model)
    for name, child in list(model[0].named_children()):
        if isinstance(child, nn.BatchNorm2d):
            setattr(model[0], name, nn.InstanceNorm2d(child.num_features))


def gradual_unfreezing():
    model = Gpt()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    yield model, written(model)
    model.blocks[-1].requires_grad_(True)
    yield
    model.requires_grad_(True)


def encoder_detached():
    model, freeze = Mlp(), True

    def loss(x, y):
        features = model.features(x)
        return F.cross_entropy(model.last(features.detach() if freeze else features), y)

    yield model, loss
    freeze = False


class Lora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) / 4)
        self.scaling, self.enabled = 1.0, True

    def forward(self, x):
        out = self.base(x)
        return out + self.scaling * F.linear(F.linear(x, self.a), self.b) if self.enabled else out


def adapter_added():
    model = Mlp()
    optimizer = adamw(model.parameters())
    yield model, optimizer, usual_step(classified(model), optimizer)
    model.first = Lora(model.first)
    optimizer.add_param_group({"params": [model.first.a, model.first.b]})


def adapter_scaled_and_disabled():
    model = Mlp()
    model.first = Lora(model.first)
    yield model, classified(model)
    model.first.scaling = 0.5
    yield
    model.first.enabled = False


class Adapters(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = Mlp()
        self.adapters = nn.ModuleDict({"default": nn.Linear(4, 4), "task": nn.Linear(4, 4)})
        self.active_adapters = ["default"]

    def set_adapter(self, *names):
        self.active_adapters = list(names)

    def forward(self, x):
        x = self.base(x)
        for name in self.active_adapters:
            x = x + self.adapters[name](x)
        return x


def adapter_switched():
    model = Adapters()
    yield model, classified(model)
    model.set_adapter("task")
    yield
    model.set_adapter("default", "task")


def layers_stacked():
    model = Gpt(layers=1)
    optimizer = adamw(model.parameters())
    yield model, optimizer, usual_step(written(model), optimizer)
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    optimizer.add_param_group({"params": model.blocks[1].parameters()})
    yield
    model.blocks.insert(0, GptBlock(8).requires_grad_(False))


def head_replaced():
    model = Mlp()
    optimizer = adamw(model.parameters())
    yield model, optimizer, usual_step(classified(model), optimizer)
    model.last = nn.Linear(16, 4)
    optimizer.param_groups[0]["params"][2:] = list(model.last.parameters())


def layer_initialised_anew():
    model = Mlp()
    yield model, classified(model)
    model.last.reset_parameters()
    yield
    model.apply(lambda m: nn.init.zeros_(m.bias) if isinstance(m, nn.Linear) else None)


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        self.top_k, self.jitter, self.balance = 1, 0.0, 0.0

    def forward(self, x):
        if self.training and self.jitter > 0:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        share = self.gate(x).softmax(-1)
        top, index = share.topk(self.top_k, -1)
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = outs.gather(1, index[..., None].expand(-1, -1, 4))
        return (top[..., None] * chosen).sum(1), self.balance * share.mean(0).square().sum()


def mixture_of_experts():
    model = Moe()

    def loss(x, y):
        out, balance = model(x)
        return F.cross_entropy(out, y) + balance

    yield model, loss
    model.top_k = 2
    yield
    model.jitter, model.balance = 0.125, 1.0


class Windowed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.embed, self.head = GptBlock(8), nn.Embedding(11, 8), nn.Linear(8, 11)
        self.register_buffer("mask", torch.ones(8, 8).tril().bool(), persistent=False)
        self.register_buffer("cos", None, persistent=False)
        self.set_base(100.0)

    def set_base(self, base):
        self.cos = (torch.arange(8)[:, None] / base ** (torch.arange(8) / 8)).cos()

    def forward(self, ids):
        x = self.embed(ids) * self.cos
        share = (x @ x.transpose(1, 2)).masked_fill(~self.mask, -1e4).softmax(-1)
        return self.head(self.inner(share @ x))


def attention_window_and_rope():
    model = Windowed()
    yield model, written(model)
    model.mask = model.mask & torch.ones(8, 8).triu(-2).bool()
    yield
    model.set_base(10.0)


def block_size_cropped():
    model = Gpt()
    model.config = types.SimpleNamespace(block_size=8)

    def crop(size):
        model.config.block_size = size
        model.places.weight = nn.Parameter(model.places.weight[:size].detach().clone())

    def loss(x, _):
        ids = tokens(x)[:, : model.config.block_size]
        return language_loss(model(ids), ids)

    yield model, loss
    crop(6)


class Activated(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.inner, self.head, self.act = nn.Linear(8, 16), nn.Linear(16, 4), ACT2FN[name]

    def forward(self, x):
        return self.head(self.act(self.inner(x)))


def activation_swapped():
    model = Activated("relu")
    yield model, classified(model)
    model.act = ACT2FN["gelu"]
    yield
    model.act = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))


class ByName(Activated):
    def forward(self, x):
        return self.head(ACT2FN[self.hidden_act](self.inner(x)))


def activation_by_name():
    model = ByName("relu")
    model.hidden_act = "relu"
    yield model, classified(model)
    model.hidden_act = "silu"


def forward_replaced_by_a_method():
    model = Mlp()

    def forward(self, x):
        return self.last(self.features(x) * 0.5)

    yield model, classified(model)
    model.forward = types.MethodType(forward, model)


def forward_of_a_class_replaced():
    class Net(Mlp):
        pass

    model = Net()
    yield model, classified(model)
    Net.features = lambda self, x: F.gelu(self.first(x))
    yield
    Net.forward = lambda self, x: self.last(self.features(x)) * 2


def features_kept_by_a_hook():
    model, features = Gpt(), {}
    model.blocks[0].register_forward_hook(lambda module, given, out: features.__setitem__("first", out))
    config = {"penalty": 0.0}

    def loss(x, _):
        total = language_loss(model(tokens(x)), tokens(x))
        return total + config["penalty"] * features["first"].square().mean()

    yield model, loss
    config["penalty"] = 0.5


def hooks_attached_and_removed():
    model = Mlp()
    yield model, classified(model)
    handle = model.first.register_forward_hook(lambda module, given, out: out * 0.5)
    model.last.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    yield
    handle.remove()


def halve(parameter):
    parameter.grad.mul_(0.5)


def gradient_hooks():
    model, scale = Mlp(), 1.0
    model.last.weight.register_hook(lambda grad: grad * scale)
    yield model, classified(model)
    scale = 0.25
    yield
    model.first.register_full_backward_hook(lambda module, into, out: (into[0],))
    model.first.weight.register_post_accumulate_grad_hook(halve)


def spectral_norm_added():
    model = Mlp()
    yield model, classified(model)
    parametrizations.orthogonal(model.last)


def weights_pruned():
    model = Mlp()
    yield model, classified(model)
    prune.l1_unstructured(model.first, "weight", amount=0.5)
    yield
    prune.remove(model.first, "weight")


def lottery_ticket_masks():
    model = Mlp()
    optimizer = adamw(model.parameters())
    masks = {}

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            if name in masks:
                p.grad.mul_(masks[name])
        optimizer.step()
        return loss.detach()

    yield model, optimizer, train_step
    masks["first.weight"] = (model.first.weight.abs() > 0.125).float()
    yield
    masks["first.weight"] = (model.first.weight.abs() > 0.25).float()


def dropconnect_mask_drawn_anew():
    model = Mlp()
    model.mask = torch.ones(4, 16)

    def loss(x, y):
        return F.cross_entropy(F.linear(model.features(x), model.last.weight * model.mask, model.last.bias), y)

    yield model, loss
    model.mask = (torch.rand(4, 16) > 0.5).float()
    yield
    model.mask.bernoulli_(0.5)


class FakeQuant(nn.Module):
    def __init__(self):
        super().__init__()
        self.bits, self.enabled = 8, True

    def forward(self, x):
        if not self.enabled:
            return x
        scale = 2 ** (self.bits - 3)
        return x + ((x * scale).round() / scale - x).detach()


def quantisation_aware():
    model = nn.Sequential(nn.Linear(8, 16), FakeQuant(), nn.ReLU(), nn.Linear(16, 4))
    yield model, classified(model)
    model[1].bits = 4
    yield
    model[1].enabled = False


class ProgressiveGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.old, self.new, self.alpha = nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), 0.0

    def forward(self, x):
        return self.old(x) * (1 - self.alpha) + self.new(x) * self.alpha if self.alpha < 1 else self.new(x)


def fade_in():
    model = ProgressiveGenerator()
    yield model, classified(model)
    model.alpha = min(1.0, model.alpha + 0.5)
    yield
    model.alpha = min(1.0, model.alpha + 0.5)


def progressive_resizing():
    model, size = Cnn(), 2

    def loss(x, y):
        return F.cross_entropy(model(F.interpolate(x.view(-1, 2, 2, 2), size=(size, size))), y)

    yield model, loss
    size = 4
    yield
    size = 6


def multi_scale():
    model, draws, scale = Cnn(), random.Random(0), 1.0

    def loss(x, y):
        return F.cross_entropy(model(F.interpolate(x.view(-1, 2, 2, 2), scale_factor=scale)), y)

    yield model, loss
    scale = draws.choice([2.0, 3.0])
    yield
    scale = draws.choice([4.0, 5.0])


def heads_of_tasks():
    model = Mlp()
    model.heads = nn.ModuleDict({"digits": nn.Linear(16, 4), "letters": nn.Linear(16, 4)})
    task = "digits"
    yield model, lambda x, y: F.cross_entropy(model.heads[task](model.features(x)), y)
    task = "letters"


class Supernet(nn.Module):
    def __init__(self):
        super().__init__()
        self.choice = (0, 1)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(8, 8), nn.Identity(), nn.Sequential(nn.Linear(8, 8), nn.Tanh())]) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer, pick in zip(self.layers, self.choice, strict=True):
            x = layer[pick](x)
        return self.head(x)


def architecture_search():
    model = Supernet()
    yield model, classified(model)
    model.choice = (2, 1)
    yield
    model.choice = (1, 0)


class VectorQuantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes, self.commitment = nn.Embedding(5, 8), 0.25

    def forward(self, x):
        quantized = self.codes(torch.cdist(x, self.codes.weight).argmin(-1))
        loss = F.mse_loss(quantized, x.detach()) + self.commitment * F.mse_loss(x, quantized.detach())
        return x + (quantized - x).detach(), loss


def codebook_restarted():
    model = Mlp()
    model.encoder, model.quantizer = nn.Linear(8, 8), VectorQuantizer()

    def loss(x, y):
        out, extra = model.quantizer(model.encoder(x))
        return F.cross_entropy(model(out), y) + extra

    yield model, loss
    model.quantizer.codes.weight.data[0] = torch.zeros(8)
    yield
    model.quantizer.commitment = 1.0


class Queue(nn.Module):
    """MoCo's queue: its place is a number in Python, moved at validations."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(12, 4)))
        self.start = 0

    def forward(self, q):
        return -(q @ self.keys[self.start : self.start + 6].T).logsumexp(-1).mean()


def memory_bank():
    model = Mlp()
    model.queue = Queue()
    yield model, lambda x, y: F.cross_entropy(model(x), y) - model.queue(F.normalize(model(x + 0.125)))
    model.queue.start = 6
    yield
    model.queue.keys = model.queue.keys.flip(0)


def autocast_switched_on():
    model, use_amp = Mlp(), False

    def loss(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_amp):
            return F.cross_entropy(model(x), y)

    yield model, loss
    use_amp = True


def evaluation_mode_in_part():
    model = nn.ModuleDict({"encoder": Mlp(dropout=0.5), "head": nn.Linear(4, 4)})
    yield model, lambda x, y: F.cross_entropy(model["head"](model["encoder"](x)), y)
    model["encoder"].eval()
    yield
    model.train()
