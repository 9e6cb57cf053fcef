"""A fine-tune of a timm model on handwritten digits, in the style of timm's own train script, through the door.

pip install timm torchvision
hotloop train examples/published/timm_finetune.py:make recipe.goal=max:top1 training.num_epochs=5
"""

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hotloop

try:
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}. Install what this example needs: pip install timm torchvision") from error


def make(
    model: str = "resnet18",
    pretrained: bool = False,
    lr: float = 1e-3,
    mixup: float = 0.2,
    batch_size: int = 64,
    size: int = 32,
):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=size)
    data = TensorDataset(images.expand(-1, 3, -1, -1), torch.tensor(digits.target))
    train, val = torch.utils.data.random_split(data, [0.8, 0.2], torch.Generator().manual_seed(42))
    loader = DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val, batch_size=256)

    model = timm.create_model(model, pretrained=pretrained, num_classes=10).to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=lr, weight_decay=0.05)
    mixup, loss_fn = Mixup(mixup_alpha=mixup, num_classes=10), SoftTargetCrossEntropy()

    def ready(x, y):
        return mixup(x.to(device), y.to(device))

    def step(x, y):
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def metrics():
        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in val_loader:
                right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
        return {"top1": right / len(val)}

    return hotloop.Workload(model, optimizer, step, loader, metrics=metrics, before=ready)
