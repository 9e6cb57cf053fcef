"""A LightningModule and its data, searched and cross-validated: handwritten digits, 1,797 of scikit-learn.

hotloop train examples/lightning_digits.py:Classifier data=examples/lightning_digits.py:Digits program.lr=3e-3
hotloop hpo   examples/lightning_digits.py:Classifier data=examples/lightning_digits.py:Digits recipe.goal=max:accuracy
hotloop kfold examples/lightning_digits.py:Classifier data=examples/lightning_digits.py:Digits recipe.goal=max:accuracy
"""

from typing import Annotated, Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hotloop


class Classifier(pl.LightningModule):
    """A small network that reads digits.

    Args:
        lr: the learning rate of AdamW.
        width: units of the hidden layer.
        dropout: the share of hidden units that are left out of a step.
    """

    def __init__(
        self,
        lr: Annotated[float, hotloop.Range(0, 1), hotloop.Search(log=(1e-4, 3e-2))] = 1e-3,
        width: Annotated[int, hotloop.Search(choices=(32, 64, 128))] = 64,
        dropout: Annotated[float, hotloop.Range(0, 0.5)] = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the metrics of a batch."""
        images, labels = batch
        output = self.net(images)
        self.log("accuracy", (output.argmax(1) == labels).float().mean())
        self.log("loss", F.cross_entropy(output, labels))

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and a schedule that goes by the validation."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


class Digits(pl.LightningDataModule):
    """The digits.

    Args:
        batch_size: rows in a step.
        fold: what a run of a cross-validation holds out; None holds out one row in five.
    """

    def __init__(
        self, batch_size: Annotated[int, hotloop.Range(1, 512)] = 128, fold: hotloop.Fold | None = None
    ) -> None:
        super().__init__()
        self.batch_size, self.fold = batch_size, fold or hotloop.Fold()

    def setup(self, stage: str) -> None:
        """Split the rows."""
        digits = load_digits()
        rows = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
        train, held_out = self.fold.split(len(rows), labels=digits.target)
        self.train, self.held_out = (
            torch.utils.data.Subset(rows, side) for side in (train.tolist(), held_out.tolist())
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the rows to train on, shuffled."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the rows that are held out."""
        return DataLoader(self.held_out, batch_size=512)
