import lightning
import torch

import hotloop


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def training_step(self, batch, number):
        return self.linear(batch).square().mean() / (1 + self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


model = hotloop.compile(Model(), "aot_eager")
trainer = lightning.Trainer(
    max_steps=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4))
