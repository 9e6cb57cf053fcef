"""Ten families of transformers models train under `inductor` on the CPU: compiled or with a cause, none dead or silent."""

import copy

import pytest
import torch

import hotloop

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [
    pytest.mark.inductor,
    pytest.mark.campaign,  # each family is compiled by Inductor
    # transformers and Inductor warn of deprecated parts of their own; as errors they would break tracing.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
SMALL = {**TINY, "vocab_size": 48, "max_position_embeddings": 24}
IDS = {"input_ids": torch.arange(16).reshape(2, 8) % 40 + 4, "attention_mask": torch.ones(2, 8, dtype=torch.long)}
IMAGE = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)}

FAMILIES = {
    "bert": ("BertForSequenceClassification", "BertConfig", SMALL, IDS),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", SMALL, IDS),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig", {**SMALL, "embedding_size": 8}, IDS),
    "deberta-v2": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {**SMALL, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
        IDS,
    ),
    "distilbert": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "vocab_size": 48, "max_position_embeddings": 24},
        IDS,
    ),
    "gpt2": (
        "GPT2ForSequenceClassification",
        "GPT2Config",
        {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 48, "n_positions": 24, "pad_token_id": 0},
        IDS,
    ),
    "llama": (
        "LlamaForSequenceClassification",
        "LlamaConfig",
        {**SMALL, "num_key_value_heads": 1, "pad_token_id": 0},
        IDS,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 48},
        {**IDS, "decoder_input_ids": IDS["input_ids"]},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**TINY, "image_size": 16, "patch_size": 8}, IMAGE),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"},
        IMAGE,
    ),
}


def build(family):
    kind, config, settings, inputs = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**settings)
    for name in list(vars(made)):
        if "dropout" in name or name.endswith("pdrop"):
            setattr(made, name, 0.0)  # Inductor's masks are drawn from another stream than eager's
    return getattr(transformers, kind)(made).train(), inputs


def train(model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        loss = model(**inputs).logits.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_compiled_or_says_why_not(family, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.simdlen", 1)  # the C++ compiler takes a quarter longer for vectors
    model, inputs = build(family)
    expected = train(copy.deepcopy(model), inputs)
    hotloop.compile(model, "inductor")
    assert train(model, inputs) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    status = hotloop.status(model).components["model"]
    assert status.frames_compiled >= 3
    assert status.state == "compiled" or status.causes, status
    assert status.running == "inductor"
