"""Remedies are followed: each program is declined as it is written, and captured once it does what the hint says."""

import pytest
import torch
from step_programs import GRAPH, Both, engines
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.diagnose.host_sync import LIBRARYS
from hotloop.errors import describe

MASK = nn.Transformer.generate_square_subsequent_mask(4)
RING = torch.eye(5).roll(1, 0).to_sparse().coalesce()


@pytest.fixture
def cpu():
    with engines("cpu"):
        yield Both("cpu")


def encoded(followed):
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model, settings = (
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        {"is_causal": True} if followed else {},
    )
    return model, lambda x: model(x, mask=MASK, **settings).square().mean(), lambda: (torch.randn(2, 4, 8),)


def translated(followed):
    model = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
    settings = {"tgt_is_causal": True} if followed else {}
    return model, lambda x: model(x, x, tgt_mask=MASK, **settings).square().mean(), lambda: (torch.randn(2, 4, 8),)


def clipped(followed):
    model = nn.Linear(4, 3)

    def loss(x):
        value = model(x).square().mean()
        (slope,) = torch.autograd.grad(value, [model.weight], create_graph=True)
        model.weight.grad = slope.detach().clone()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=not followed)
        return value

    return model, loss, lambda: (torch.randn(5, 4),)


def sparse(followed):
    model = nn.Linear(4, 3)
    if followed:
        return model, lambda x: torch.sparse.mm(RING, model(x)).square().mean(), lambda: (torch.randn(5, 4),)
    return model, lambda x, ring: torch.sparse.mm(ring, model(x)).square().mean(), lambda: (torch.randn(5, 4), RING)


def sparse_made_in_the_step(followed):
    model = nn.Linear(4, 3)
    if not followed:
        return sparse(followed=False)

    def loss(x, indices, values):
        ring = torch.sparse_coo_tensor(indices, values, (5, 5), is_coalesced=True)
        return torch.sparse.mm(ring, model(x)).square().mean()

    return model, loss, lambda: (torch.randn(5, 4), RING.indices(), RING.values())


def packed(followed):
    model = nn.LSTM(4, 4, batch_first=True)

    def loss(x, lengths):
        if followed:
            last = (lengths - 1)[:, None, None].expand(-1, 1, 4)
            return model(x)[0].gather(1, last).square().mean()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return model(packed)[1][0].square().mean()

    return model, loss, lambda: (torch.randn(2, 3, 4), torch.tensor([3, 2]))


def uncertain(followed):
    model = nn.Linear(4, 3)

    def loss(x):
        mean, var = model(x), model(x).square()
        if followed:
            var = var.clamp(min=1e-6)
            return (0.5 * (var.log() + (x[:, :3] - mean) ** 2 / var)).mean()
        return F.gaussian_nll_loss(mean, x[:, :3], var)

    return model, loss, lambda: (torch.randn(5, 4),)


def averaged(followed):
    model = nn.BatchNorm1d(4, momentum=0.1 if followed else None)
    return model, lambda x: model(x).exp().mean(), lambda: (torch.randn(5, 4),)


def speech(followed, *, mask_time_prob=0.0, layerdrop=0.5, apply_spec_augment=True):
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_conv_pos_embeddings"), 8)
    config = Wav2Vec2Config(
        **sizes,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_conv_pos_embedding_groups=2,
        conv_dim=(8,),
        conv_kernel=(4,),
        conv_stride=(4,),
        num_feat_extract_layers=1,
        mask_time_prob=mask_time_prob,
        mask_time_length=2,
        layerdrop=0.0 if followed else layerdrop,
        apply_spec_augment=apply_spec_augment,
    )
    model = Wav2Vec2Model(config)
    seen = torch.ones(2, 64, dtype=torch.long)
    return model, lambda x: model(x, seen).last_hidden_state.square().mean(), lambda: (torch.randn(2, 64),)


def masked(followed):
    return speech(followed=True, mask_time_prob=0.5, apply_spec_augment=not followed)


def experts(followed):
    from transformers import MixtralConfig, MixtralModel

    config = MixtralConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_local_experts=2,
        experts_implementation="batched_mm" if followed else "eager",
    )
    model = MixtralModel(config)
    return (
        model,
        lambda x: model(x, use_cache=False).last_hidden_state.square().mean(),
        lambda: (torch.randint(11, (2, 5)),),
    )


def of_rows(loss_of):
    """Make a program of a loss of a small model, its rows and their labels."""

    def program(followed):
        model = nn.Linear(4, 3)

        def batch():
            return torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])[torch.randperm(8)]

        return model, lambda x, y: loss_of(model(x), y, followed), batch

    program.__name__ = loss_of.__name__
    return program


@of_rows
def encoded_in_ones(logits, y, followed):
    ones = (y[..., None] == torch.arange(3, device=y.device)).to(logits.dtype) if followed else F.one_hot(y, 3)
    return (logits - ones).square().mean()


@of_rows
def encoded_in_so_many_ones(logits, y, followed):
    ones = (y[..., None] == torch.arange(3, device=y.device)).to(logits.dtype) if followed else F.one_hot(y)
    return (logits - ones).square().mean()


@of_rows
def chosen_by_a_mask(logits, y, followed):
    mask = y > 0
    if followed:
        return torch.where(mask[:, None], logits, 0).square().sum() / mask.sum()
    return logits[mask].square().sum() / mask.sum()


@of_rows
def selected_by_a_mask(logits, y, followed):
    mask = (y > 0)[:, None]
    return (logits * mask if followed else logits.masked_select(mask)).square().sum()


@of_rows
def chosen_by_places(logits, y, followed):
    if followed:
        return (logits * (y > 0).to(logits.dtype)[:, None]).square().sum()
    return logits[(y > 0).nonzero()[:, 0]].square().sum()


@of_rows
def repeated(logits, y, followed):
    sizes = {"output_size": 15} if followed else {}
    return logits.repeat_interleave(y + 1, 0, **sizes).square().mean()


@of_rows
def counted(logits, y, followed):
    if followed:
        counts = torch.zeros(3, device=y.device).index_add_(0, y, torch.ones(len(y), device=y.device))
    else:
        counts = torch.bincount(y, minlength=3)
    return (logits * counts).square().mean()


@of_rows
def decided(logits, y, followed):
    one, other = torch.square, torch.abs
    if followed:
        return torch.where(y[0] > 0, one(logits), other(logits)).mean()
    return torch.cond(y[0] > 0, one, other, (logits,)).mean()


REMEDIES = {
    encoded_in_ones: ("a value is read on the host", "torch.arange(n, device=y.device)).to(x.dtype)"),
    encoded_in_so_many_ones: ("a value is read on the host", "torch.arange(n, device=y.device)).to(x.dtype)"),
    chosen_by_a_mask: ("depends on the data: index", "torch.where(mask, x, 0)"),
    selected_by_a_mask: ("depends on the data: masked_select", "or x times the mask"),
    chosen_by_places: ("depends on the data: nonzero", "weight them instead by (condition).to(x.dtype)"),
    repeated: ("depends on the data: repeat_interleave", "by output_size="),
    counted: ("depends on the data: bincount", "index_add_(0, y, torch.ones("),
    decided: ("the host reads a value to decide what runs: torch.cond", "torch.where(condition, a, b)"),
    uncertain: ("in torch/nn/functional.py:", "gaussian_nll_loss"),
    packed: ("in torch/nn/modules/rnn.py:", "torch.gather"),
    averaged: ("in torch/nn/modules/batchnorm.py:", "momentum"),
    speech: ("transformers/models/wav2vec2/modeling_wav2vec2.py:", "layerdrop=0.0"),
    masked: ("depends on the data: index", "keep the size"),  # on a GPU the library's copy to the host comes first
    experts: ("transformers/models/mixtral/modeling_mixtral.py:", 'experts_implementation="batched_mm"'),
    encoded: ("in torch/nn/modules/transformer.py:", "is_causal="),
    translated: ("in torch/nn/modules/transformer.py:", "tgt_is_causal="),
    clipped: ("in torch/nn/utils/clip_grad.py:", "error_if_nonfinite=False"),
    sparse: ("argument args[1] has layout torch.sparse_coo", "read it from outside"),
    sparse_made_in_the_step: ("argument args[1] has layout torch.sparse_coo", "pass its indices and values"),
}


def training(program, *, followed, **settings):
    def run(both):
        torch.manual_seed(0)
        model, loss_of, batch = program(followed=followed)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)

        @both.loop(model, optimizer, **settings).step
        def train_step(*args):
            loss = loss_of(*args)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(10):
            both.note(train_step(*batch()))
        return {"model": model}

    return run


@pytest.mark.parametrize("program", REMEDIES, ids=lambda program: program.__name__)
def test_a_library_that_reads_is_named_with_its_switch_and_the_switch_does_it(cpu, program):
    reason, hint = REMEDIES[program]
    told = cpu.declines(training(program, followed=False), reason=reason, hint=hint)
    assert told.file in (__file__, None)
    if program in (speech, masked):
        pytest.importorskip("transformers", "5.23", reason="layer drop reads at 0.0 too")
    run = cpu.alike(training(program, followed=True), exact=True)
    assert not run.declined, run.declined
    assert run.status().tier == GRAPH


def test_a_library_without_a_known_switch_says_where_to_look(cpu):
    def unpadded(followed):
        model = nn.Linear(4, 3)

        def loss(x, lengths):
            rows = nn.utils.rnn.unpad_sequence(model(x), lengths, batch_first=True)
            return torch.cat(rows).square().mean()

        return model, loss, lambda: (torch.randn(2, 3, 4), torch.tensor([3, 2]))

    cpu.declines(training(unpadded, followed=False), reason="in torch/nn/utils/rnn.py:", hint=LIBRARYS)


def test_what_counts_in_a_compiled_tier_is_told_that_a_proof_runs_twice():
    """Nothing is replayed there, so that a replay explains nothing."""
    model, counts = nn.Linear(4, 3), {"steps": 0}
    with hotloop.Loop(model, run="aot_eager") as loop:

        @loop.step
        def train_step(x):
            counts["steps"] += 1
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        for _ in range(4):
            train_step(torch.randn(2, 4))
        assert "a proof runs the step twice" in str(loop.status().to_dict())


def test_the_dispatchers_list_of_backends_is_left_out():
    with pytest.raises(NotImplementedError) as raised:
        torch.as_strided(torch.eye(2).to_sparse(), (2,), (1,))
    assert "\n" not in describe(raised.value)
    assert describe(raised.value).endswith("from the 'SparseCPU' backend")
