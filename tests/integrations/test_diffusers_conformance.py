"""The conformance suite on a diffusion training loop, on a small DiT."""

import torch
from conformance import Conformance
from diffusers import DiTTransformer2DModel
from fitting import Fitted
from python_in_steps import weighed
from torch.nn import functional as F

import hotloop
from hotloop.integrations.diffusers import Parts, compile  # noqa: A004 - hotloop.compile's name

RAISED = "raised with cause and remedy: nobody owns the step, where no hotloop.Loop is around it"


class TestDiffusers(Conformance):
    limits = {"test_failing_run_of_a_forward": RAISED, "test_failing_run_of_a_backward": RAISED}
    steps = 6
    test_captured_step = None

    def model(self):
        return DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=4, in_channels=2, out_channels=2, num_layers=1, sample_size=4,
            patch_size=2, num_embeds_ada_norm=10, norm_num_groups=2, dropout=0.1,
        )  # fmt: skip

    def batches(self, count, *, ragged=False):
        draws = torch.Generator().manual_seed(7)
        sizes = [4] * (count - ragged) + [3] * ragged
        return [
            (torch.randn(size, 2, 4, 4, generator=draws), torch.randint(10, (size,), generator=draws)) for size in sizes
        ]

    def broken(self):
        return torch.ones(4, 3, 4, 4), torch.zeros(4, dtype=torch.int64)

    def fit(self, task):
        optimizer = torch.optim.AdamW(task.model.parameters(), lr=0.01, fused=True)
        begun = 0
        if task.resume is not None:
            state = torch.load(task.resume / "optimizer.pt", weights_only=True)
            task.model.load_state_dict(type(task.model).from_pretrained(task.resume).state_dict())
            optimizer.load_state_dict(state)
            begun = 1
        parts = Parts(transformer=task.model, vae=torch.nn.Linear(1, 1).requires_grad_(requires_grad=False))
        if task.run is not None:
            assert compile(parts, task.run) is parts
        losses = []
        for _ in range(begun, task.epochs):
            task.model.train()
            for number, (images, at) in enumerate(task.batches, 1):
                task.begin()
                noise = images.flip(0)
                found = task.model(images + noise, timestep=at, class_labels=at).sample
                loss = weighed(F.mse_loss(found, noise), task.python)
                (loss / task.accumulate).backward()
                if number % task.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
            task.model.eval()
            with torch.no_grad():
                for images, at in task.validation:
                    task.model(images, timestep=at, class_labels=at)
        if task.save is not None:
            task.model.save_pretrained(task.save)
            torch.save(optimizer.state_dict(), task.save / "optimizer.pt")
        if task.run is None:
            return Fitted(model=task.model, losses=losses, optimizer=optimizer.state_dict())
        return Fitted(
            model=task.model, losses=losses, optimizer=optimizer.state_dict(), status=hotloop.status(parts),
            remove=lambda: hotloop.uncompile(parts),
        )  # fmt: skip

    def saved(self, path):
        return type(self.model()).from_pretrained(path).state_dict()
