"""Fabric and Lightning on a GPU: whole steps in real CUDA graphs, and 16-mixed with its GradScaler."""

import lightning
import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hotloop.integrations.fabric import loop as fabric_loop
from hotloop.integrations.lightning import HotLoop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 4))


def batches():
    draws = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 16, generator=draws), torch.randint(4, (8,), generator=draws)) for _ in range(24)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_step_around_fabrics_backward_is_captured(precision):
    left = []
    for run in ("eager", "eager+graph"):
        fabric = lightning.Fabric(accelerator="cuda", devices=1, precision=precision)
        model = net()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=2**-8, fused=True))
        loop = fabric_loop(fabric, model, optimizer, run=run)

        @loop.step
        def step(x, y, fabric=fabric, model=model, optimizer=optimizer):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses = torch.stack([step(*fabric.to_device(batch)) for batch in batches()])
        assert loop.status().tier == run, loop.status()
        left.append((losses, {name: one.clone() for name, one in model.state_dict().items()}))
        loop.close()
    torch.testing.assert_close(left[0], left[1], rtol=1e-4, atol=1e-5)


class Module(pl.LightningModule):
    def __init__(self, fused):
        super().__init__()
        self.net, self.fused = net(), fused

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        # A recording has the fused kernel: bfloat16 would amplify what an unfused one rounds otherwise.
        return torch.optim.AdamW(self.parameters(), lr=2**-8, fused=self.fused)


def trained(run, precision, *, fused=True, clip=None):
    hot = HotLoop(run=run)
    trainer = pl.Trainer(
        accelerator="cuda", devices=1, precision=precision, max_epochs=2, gradient_clip_val=clip, callbacks=[hot],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Module(fused)
    trainer.fit(model, DataLoader(batches(), batch_size=None))
    left = {name: one.cpu() for name, one in model.state_dict().items()}
    return (left, trainer.callback_metrics["loss_epoch"]), hot.status().loop


# Under mixed precision Lightning clips no gradients of a fused optimizer.
@pytest.mark.parametrize(("precision", "clip"), [("32-true", 0.5), ("bf16-mixed", None), ("16-mixed", None)])
def test_a_trainers_step_is_captured(precision, clip):
    eager, _ = trained("eager", precision, clip=clip)
    ours, loop = trained("eager+graph", precision, clip=clip)
    assert loop.tier == "eager+graph", str(loop)
    torch.testing.assert_close(eager, ours, rtol=1e-4, atol=1e-5)


def test_a_trainers_unfused_optimizer_under_a_scaler_is_captured():
    eager, _ = trained("eager", "16-mixed", fused=False, clip=0.5)
    ours, loop = trained("eager+graph", "16-mixed", fused=False, clip=0.5)
    assert loop.tier == "eager+graph", str(loop)
    torch.testing.assert_close(eager, ours, rtol=1e-4, atol=1e-5)
