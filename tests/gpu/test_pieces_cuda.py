"""Blocks that are captured one by one on a GPU: dropout, autocast, and a model of transformers with layer drop."""

import pytest
import torch

import hotloop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def train(run, *, bf16, dropout, steps=40):
    """Train BART with layer drop; gives losses, the model, the loop, and where the GPU's random stream ended."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    depth = {"encoder_layers": 4, "decoder_layers": 4, "encoder_layerdrop": 0.1, "decoder_layerdrop": 0.1}
    config = BartConfig(vocab_size=100, dropout=dropout, **sizes, **heads, **depth)
    model = BartForConditionalGeneration(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-10, fused=True)
    loop = hotloop.Loop(model, optimizer, run=run)

    @loop.step
    def step(ids, labels):
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    draws = torch.Generator().manual_seed(2)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        ids, labels = torch.randint(4, 100, (2, 8, 16), generator=draws).cuda()
        losses.append(step(ids, labels))
    return [loss.item() for loss in losses], model, loop, torch.cuda.get_rng_state()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_speech_like_model_with_layer_drop_trains_as_eager_does(bf16, dropout):
    losses, model, _, position = train("eager", bf16=bf16, dropout=dropout)
    ours, captured, loop, ended = train("pieces", bf16=bf16, dropout=dropout)
    assert loop.status().tier == "pieces", loop.status()
    assert loop._runners[0].pieces.recordings >= 3, str(loop._runners[0].pieces)
    assert ours == pytest.approx(losses, rel=3e-2 if bf16 else 1e-4)
    assert torch.equal(position, ended)
    if not bf16:
        for one, other in zip(captured.state_dict().values(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
