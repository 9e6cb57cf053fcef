"""A fine-tune of a timm model on handwritten digits, in the style of timm's own train script."""

import argparse

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="resnet18")
parser.add_argument("--pretrained", action="store_true")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--mixup", type=float, default=0.2)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--size", type=int, default=32)


def main():
    args = parser.parse_args()
    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=args.size)
    data = TensorDataset(images.expand(-1, 3, -1, -1), torch.tensor(digits.target))
    train, val = torch.utils.data.random_split(data, [0.8, 0.2], torch.Generator().manual_seed(42))
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val, batch_size=256)

    model = timm.create_model(args.model, pretrained=args.pretrained, num_classes=10).to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=args.lr, weight_decay=0.05)
    mixup, loss_fn = Mixup(mixup_alpha=args.mixup, num_classes=10), SoftTargetCrossEntropy()

    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        for x, y in loader:
            x, y = mixup(x.to(device), y.to(device))
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in val_loader:
                right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
        top1 = right / len(val)
        print(f"epoch {epoch}: loss {loss.item():.4f}, top1 {top1:.4f}")
        if top1 > best:
            best = top1
            torch.save(model.state_dict(), "best.pth")


if __name__ == "__main__":
    main()
