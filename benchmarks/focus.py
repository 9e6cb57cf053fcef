"""The gain of the lens in recipe `focus`: held-out loss at equal budget, against recency, random focus, shared words.

usage: python benchmarks/focus.py [--seeds 0 1 2] [--runs FOLDER] [--out benchmarks/results/DATE-cpu-focus.json]
       [--picture docs/images/focus.svg] [settings of the recipe ...]

Each seed is a run of `hotloop train recipe=focus` with documents, split and networks of its own; one that stands in
FOLDER/seed0 already, and so on, is judged as it is. All ways to focus read the same held-out texts with the same
networks; differences are of one text and the same text focused otherwise. The picture is of the first held-out text of
the first seed in which the allocator changes a block, whatever came of it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import html
import io
import json
import pathlib
import statistics
import tempfile

import torch
from ledger import processor
from rich.console import Console

from hotloop import record
from hotloop.recipes import focus
from hotloop.recipes.focus import texts
from hotloop.recipes.focus.context import BLOCK, by_block, lay_out
from hotloop.recipes.focus.program import WAYS, Controller
from hotloop.train import checkpoint, configure, start

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")
SLOT, HIGH, LEFT = 6.2, 34, 74


def trained(seed, folder, settings):
    """Train a seed, or take the run that is there; return its settings, its weights and its record."""
    if not (folder / checkpoint.FOLDER / checkpoint.LAST).is_file():
        given = ["recipe=focus", *settings, f"run.seed={seed}", "run.device=cpu", f"run.folder={folder}"]
        focus.train(start.prepare(given), Console(file=io.StringIO()))
    document = checkpoint.load(checkpoint.find(folder, checkpoint.BEST))
    return configure.from_dict(document["settings"]), document["model"], record.load(folder)


def overlap(controller, batch):
    """Focus on the blocks that share the rarest words with the newest one, which needs no training."""
    frame, vocabulary = controller.frame, controller.model.tokens.num_embeddings
    counts = torch.bincount(controller.data.train.flatten(), minlength=vocabulary).float() + 1
    rare = (-(counts / counts.sum()).log() - 5).clamp(min=0)
    blocks = batch[:, :-BLOCK].view(len(batch), -1, BLOCK)
    there = torch.zeros(*blocks.shape[:2], vocabulary).scatter_(2, blocks, 1.0)
    shared = (there * rare * there[:, -1:]).sum(-1)[:, : frame.blocks - frame.protected]
    expanded = torch.ones(len(batch), frame.blocks, dtype=torch.bool)
    expanded[:, : shared.shape[1]] = (
        torch.zeros_like(shared).bool().scatter(1, shared.topk(frame.room).indices, value=True)
    )
    return expanded


def come_back_to(controller, sides, tokens):
    """Return for each held-out text the number of the run that it continues at its end."""
    chosen, frame = controller.focus, controller.frame
    documents = [tokens.encode(one.text).numpy().tobytes() for one in sides.validation]
    run = (frame.blocks - frame.protected) // chosen.documents * BLOCK
    found = []
    for text in controller.data.validation:
        begins = text[chosen.documents * run :][:16]
        seams = [
            torch.cat([text[place * run :][:run][-16:], begins]).numpy().tobytes() for place in range(chosen.documents)
        ]
        found.append(next((place for place, seam in enumerate(seams) if any(seam in one for one in documents)), -1))
    return torch.tensor(found)


@torch.no_grad()
def judged(controller):
    """Return the loss of each held-out text for each way, and the time and choices of the lens."""
    losses, taken, edits = {way: [] for way in (*WAYS, "overlap", "gists alone")}, [], []
    torch.manual_seed(controller.settings.run.seed)
    for batch in controller.held_out():
        focused = controller.focused(batch[:, :-BLOCK])
        contexts = {
            "lens": focused.expanded,
            "recency": controller.frame.newest(len(batch)),
            "random": controller.frame.drawn(len(batch)),
            "overlap": overlap(controller, batch),
            "gists alone": torch.arange(controller.frame.blocks).expand(len(batch), -1)
            >= controller.frame.blocks - controller.frame.protected,
        }
        for way, expanded in contexts.items():
            losses[way].append(controller.ahead(batch, expanded))
        taken.append(controller.frame.slots(focused.expanded))
        edits.append(focused.edits)
    return {way: torch.cat(found) for way, found in losses.items()}, torch.cat(taken), torch.cat(edits)


def figures(controller, losses, taken, edits, back, document):  # noqa: PLR0913, PLR0917 - what was found
    """Summarise a seed."""
    ahead = {}
    for way in (one for one in losses if one != "lens"):
        gain = losses[way] - losses["lens"]
        ahead[way] = {"nats": gain.mean().item(), "standard_error": (gain.std() / len(gain) ** 0.5).item()}
    last = controller.focus.documents - 1
    earlier = {
        name: {way: found[chosen].mean().item() for way, found in losses.items()}
        for name, chosen in (("the newest document", back == last), ("an earlier one", (back >= 0) & (back < last)))
    }
    steps = document["steps"]
    return {
        "seed": controller.settings.run.seed,
        "texts": len(taken),
        "loss": {way: found.mean().item() for way, found in losses.items()},
        "lens_is_ahead_of": ahead,
        "where_a_text_comes_back_to": {
            **earlier,
            "texts": [int((back == place).sum()) for place in range(-1, last + 1)],
        },
        "slots": {
            "lens": taken.float().mean().item(),
            "others": controller.frame.slots(controller.frame.newest(1)).item(),
        },
        "edits": edits.float().mean().item(),
        "agreement": statistics.fmean(one["agreement"] for one in steps[-50:]),
        "steps": len(steps),
        "seconds_in_steps": sum(one["seconds"] for one in steps),
    }


def picture(controller, losses, edits, back, tokens):
    """Draw the working context of one text before and after focus, as SVG."""
    which = int((edits > 0).nonzero()[0])
    text, frame = controller.data.validation[which], controller.frame
    focused = controller.focused(text[None, :-BLOCK])
    first = frame.newest(1)
    scores = by_block(focused.scores[0], lay_out(first, frame), frame.blocks)[0].tolist()
    run = (frame.blocks - frame.protected) // controller.focus.documents
    of = [
        block // run if block < run * controller.focus.documents else int(back[which]) for block in range(frame.blocks)
    ]
    said = ["".join(sign if sign.isprintable() else " " for sign in tokens.decode(one)) for one in text.split(BLOCK)]
    told = (
        (18, f"{frame.blocks} blocks of {BLOCK} tokens in {frame.budget} slots: wide ones as tokens, narrow as gists;"),
        (34, "one colour a document; only the contexts differ, not the networks."),
        (204, "Bars: what the lens says of each block at first. Green asks to expand, red to collapse."),
        (220, f"Nats: the loss of the {BLOCK} tokens behind the text. The tooltip of a block is its text."),
    )  # fmt: skip
    parts = [f'<text x="10" y="{y}">{line}</text>' for y, line in told]
    for y, name, expanded, way in ((54, "before", first[0], "recency"), (142, "after", focused.expanded[0], "lens")):
        loss = losses[way][which].item()
        parts.append(f'<text x="10" y="{y + 14}" font-weight="bold">{name}</text>')
        parts.append(f'<text x="10" y="{y + 30}">{loss:.2f} nats</text>')
        parts += cells(expanded.tolist(), of, said, y)
    parts += bars(first[0].tolist(), scores, 112)
    size = f'width="{LEFT + frame.budget * SLOT + 20:.0f}" height="232"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def places(expanded):
    """Return each block's number, place and width in the picture."""
    x = float(LEFT)
    for block, whole in enumerate(expanded):
        wide = SLOT * (BLOCK if whole else 1)
        yield block, x, wide - 1
        x += wide


def cells(expanded, of, said, y):
    """Draw the blocks of one working context."""
    for block, x, wide in places(expanded):
        colour = COLOURS[of[block]] if of[block] >= 0 else "#888"
        look = 'fill-opacity="0.9" stroke="#000"' if expanded[block] else 'fill-opacity="0.5"'
        title = f"<title>block {block}: {html.escape(said[block])}</title>"
        yield f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{HIGH}" fill="{colour}" {look}>{title}</rect>'
        if expanded[block]:
            yield f'<text x="{x + 6:.1f}" y="{y + 21}" fill="#fff">block {block}</text>'


def bars(expanded, scores, y):
    """Draw the lens's score of each block as a bar, up from ``y`` or down."""
    for block, x, wide in places(expanded):
        high = 18 * abs(scores[block])
        top, colour = (y - high, "#2a7") if scores[block] > 0 else (y, "#c33")
        yield f'<rect x="{x:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{colour}"/>'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--picture", type=pathlib.Path)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in options.seeds:
            folder = (options.runs or pathlib.Path(scratch)) / f"seed{seed}"
            settings, weights, document = trained(seed, folder, options.settings)
            sides = texts.load(settings)
            tokens, data = focus.windows(settings, sides)
            controller = Controller(settings, tokens.count, data, torch.device("cpu"))
            for name, model in focus.workload_of(controller).models().items():
                checkpoint.fit_weights(model, weights[name], f"focus ({name})")
            losses, taken, edits = judged(controller)
            back = come_back_to(controller, sides, tokens)
            rows.append(figures(controller, losses, taken, edits, back, document))
            print(json.dumps(rows[-1]), flush=True)
            if options.picture and seed == options.seeds[0]:
                options.picture.write_text(picture(controller, losses, edits, back, tokens))
    found = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "settings": configure.to_dict(settings)["focus"],
        "unit": "nats a token, of the 32 tokens that follow each held-out text",
        "seeds": rows,
        "mean_loss": {way: statistics.fmean(row["loss"][way] for row in rows) for way in rows[0]["loss"]},
    }
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["mean_loss"], indent=1))


if __name__ == "__main__":
    main()
