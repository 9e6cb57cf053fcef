"""Workloads of many small kernels that are hard to capture whole: a host read, a check, or state of a library's own."""

from __future__ import annotations

import torch
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F  # noqa: N812 - torch's own custom

from . import models
from .program import BATCHES, Program, adamw


def speech(place):
    """Speech2Text of transformers, 18 layers of width 256, 8 clips of 10 s; its layer drop draws on the host."""
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration

    words, frames, length, number = place.of(gpu=(10_000, 1_000, 64, 8), cpu=(60, 32, 8, 2))
    small = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "conv_channels": 32,
    }
    drop = {"encoder_layerdrop": 0.1, "decoder_layerdrop": 0.1}
    config = Speech2TextConfig(vocab_size=words, **drop, **place.of(gpu={}, cpu=small))
    model = place.build(lambda: Speech2TextForConditionalGeneration(config))
    optimizer, autocast = adamw(model.parameters()), place.autocast()

    def train_step(features, labels):
        with autocast():
            loss = model(input_features=features, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = [
        (place.normal(number, frames, config.input_feat_per_channel), place.whole(5, words, number, length))
        for _ in range(BATCHES)
    ]
    return Program(model, optimizer, train_step, batches)


def t5(place):
    """T5-small, 8 texts of 128 words to 32; its attention is not fused, and its mask copies a number to the device."""
    from transformers import T5Config, T5ForConditionalGeneration

    small = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    words, number, length, answer = place.of(gpu=(32_128, 8, 128, 32), cpu=(60, 2, 8, 4))
    sized = place.of(gpu={"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}, cpu=small)
    config = T5Config(vocab_size=words, decoder_start_token_id=0, **sized)
    model = place.build(lambda: T5ForConditionalGeneration(config))
    optimizer, autocast = adamw(model.parameters()), place.autocast()

    def train_step(input_ids, attention_mask, labels):
        with autocast():
            loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    texts = [(place.whole(2, words, number, length), place.whole(2, words, number, answer)) for _ in range(BATCHES)]
    return Program(model, optimizer, train_step, [(text, torch.ones_like(text), labels) for text, labels in texts])


def deberta(place):
    """DeBERTa-v3-base as a classifier of 16 texts of 128 words, with dropout; TorchScript makes its scales."""
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    base = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    words, number, length, buckets = place.of(gpu=(128_100, 16, 128, 256), cpu=(60, 2, 8, 8))
    config = DebertaV2Config(
        vocab_size=words,
        relative_attention=True,
        position_buckets=buckets,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        type_vocab_size=0,
        position_biased_input=False,
        **place.of(gpu=base, cpu=small),
    )
    model = place.build(lambda: DebertaV2ForSequenceClassification(config))
    optimizer, autocast = adamw(model.parameters()), place.autocast()

    def train_step(input_ids, attention_mask, labels):
        with autocast():
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
        loss = F.cross_entropy(logits.float(), labels)  # the model's own loss looks for rows with labels on the host
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    texts = [(place.whole(4, words, number, length), place.whole(0, 2, number)) for _ in range(BATCHES)]
    return Program(model, optimizer, train_step, [(text, torch.ones_like(text), labels) for text, labels in texts])


def ppo(place):
    """A minibatch of a PPO update: actor and critic of width 256 in float32, with the checks of torch.distributions."""
    number, seen, moves, width = place.of(gpu=(4096, 64, 8, 256), cpu=(32, 8, 2, 16))
    model = place.build(lambda: models.ActorCritic(seen, moves, width))
    optimizer = adamw(model.parameters())

    def train_step(observed, moved, old, advantage, returned):
        mean, deviation, value = model(observed)
        chances = Normal(mean, deviation)
        ratio = (chances.log_prob(moved).sum(-1) - old).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = 0.5 * F.mse_loss(value, returned) - gain - 0.01 * chances.entropy().sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = []
    for _ in range(BATCHES):
        moved = place.normal(number, moves)
        old = Normal(torch.zeros_like(moved), 1.0).log_prob(moved).sum(-1)
        batches.append((place.normal(number, seen), moved, old, place.normal(number), place.normal(number)))
    return Program(model, optimizer, train_step, batches)


def vae(place):
    """A beta-VAE of 128 pictures of 64 x 64 in float32, with the checks of torch.distributions."""
    number, width, code = place.of(gpu=(128, 64, 10), cpu=(4, 8, 2))
    model = place.build(lambda: models.Vae(width, code))
    optimizer = adamw(model.parameters())

    def train_step(pictures):
        mean, log_variance = model.encode(pictures)
        codes = Normal(mean, (0.5 * log_variance).exp())
        seen = model.decoder(codes.rsample())
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
        loss = F.binary_cross_entropy_with_logits(seen, pictures, reduction="sum") / len(pictures)
        loss = loss + 4.0 * kl_divergence(codes, prior).sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Program(model, optimizer, train_step, [(place.normal(number, 3, 64, 64).sigmoid(),) for _ in range(BATCHES)])


def lstm(place):
    """A language model of two LSTM layers of width 650 with dropout between them, on 32 texts of 35 words."""
    words, width, number, length = place.of(gpu=(33_278, 650, 32, 35), cpu=(64, 16, 2, 8))
    model = place.build(lambda: models.Lstm(words, width, layers=2, dropout=0.5))
    optimizer, autocast = adamw(model.parameters()), place.autocast()

    def train_step(x, y):
        with autocast():
            loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    texts = [place.whole(0, words, number, length + 1) for _ in range(BATCHES)]
    return Program(
        model, optimizer, train_step, [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]
    )
