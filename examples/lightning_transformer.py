"""Lightning's demo transformer in its Trainer, fitted with hotloop, whose status says what ran and what that saved."""

import argparse
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos import LightningTransformer
from torch.utils.data import DataLoader

from hotloop.integrations.lightning import HotLoop

VOCABULARY, BATCH, LENGTH = 128, 4, 64


class Transformer(LightningTransformer):
    """The demo's module, without the text that it downloads."""

    def prepare_data(self) -> None:
        """Prepare nothing: the tokens are made below."""


def fit(batches: int, *callbacks: pl.Callback, accelerator: str = "auto") -> pl.Trainer:
    """Fit a fresh model on tokens that follow each other by a rule."""
    pl.seed_everything(0, verbose=False)
    tokens = (torch.arange(LENGTH + 1) * 7 + torch.arange(BATCH * batches)[:, None]) % VOCABULARY
    loader = DataLoader(list(zip(tokens[:, :-1], tokens[:, 1:], strict=True)), batch_size=BATCH)
    trainer = pl.Trainer(
        accelerator=accelerator, devices=1, max_epochs=1, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Transformer(vocab_size=VOCABULARY), loader)
    return trainer


def main() -> None:
    """Fit as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="auto", help="auto, a tier, or a preset")
    parser.add_argument("--batches", type=int, default=40, help="of the fit")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    accelerator = "auto" if torch.cuda.is_available() else "cpu"
    hot = HotLoop(run=given.run)
    fit(given.batches, hot, accelerator=accelerator)
    print(hot.status())  # noqa: T201 - the program's output


if __name__ == "__main__":
    main()
