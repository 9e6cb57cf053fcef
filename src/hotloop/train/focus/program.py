"""The two-network focus controller as a program: its training step, the allocator between the steps, and its figures."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.train.fit import parameter_groups, schedule
from hotloop.train.focus import losses
from hotloop.train.focus.allocator import Focused, focus
from hotloop.train.focus.context import BLOCK, Frame, by_block, fill, lay_out
from hotloop.train.focus.networks import Gist, Lens, Reader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from hotloop.train.settings import Settings

WAYS = ("lens", "recency", "random")
"""How held-out texts are focused: by the allocator, on the newest blocks, on blocks drawn at random."""


class Data(NamedTuple):
    """Windows of tokens, int64 of shape (windows, blocks x BLOCK + BLOCK): to learn from, and to judge by."""

    train: Tensor
    validation: Tensor


class Controller:
    """A language model that reads through a budget, and the two networks that decide what it sees.

    Args:
        settings: of the run.
        vocabulary: how many tokens there are.
        data: the windows.
        device: where all of it computes.
    """

    def __init__(self, settings: Settings, vocabulary: int, data: Data, device: torch.device) -> None:
        self.settings, self.data, self.device = settings, data, device
        self.focus, self.training = settings.focus, settings.training
        self.frame = Frame.of(settings.focus)
        self.model = Reader(vocabulary, settings.focus).to(device)
        self.gist, self.lens = Gist(settings.focus).to(device), Lens(settings.focus).to(device)
        self.loader = DataLoader(
            TensorDataset(data.train), min(self.training.batch_size, len(data.train)), shuffle=True, drop_last=True
        )
        networks = torch.nn.ModuleList([self.model, self.gist, self.lens])
        self.parameters = list(networks.parameters())
        self.optimizer = torch.optim.AdamW(
            parameter_groups(networks, self.training.weight_decay), lr=self.training.learning_rate
        )
        steps = min(len(self.loader) * self.training.num_epochs, self.training.max_steps or 2**62)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule(self.training, steps))

    # -- training --------------------------------------------------------------------------------------------------

    def step(self, texts: Tensor, expanded: Tensor) -> Mapping[str, Tensor]:
        """Train on texts, each read through several contexts.

        Args:
            texts: (texts, blocks x BLOCK + BLOCK), int64.
            expanded: (texts, contexts, blocks), bool.
        """
        with self.precision():
            next_token, worth, ahead = self.judged(texts, expanded)
            preferred, agreement = losses.preference(worth, ahead)
            loss = next_token + preferred
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm or torch.inf, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "next_token": next_token, "preference": preferred, "agreement": agreement}

    def judged(self, texts: Tensor, expanded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give the mean loss of all tokens, the lens's view of the contexts, and what came of each: (texts, contexts)."""
        rows, contexts, blocks = expanded.shape
        layout = lay_out(expanded.flatten(0, 1), self.frame)
        tokens = self.model.tokens(texts)
        gists = self.gist(tokens[:, :-BLOCK].reshape(rows * blocks, BLOCK, -1)).view(rows, blocks, -1)
        context = fill(layout, tokens[:, :-BLOCK], gists) + self.model.place(layout.block, layout.place)

        # What follows each slot: within the context, the next token of its block or of the block after it.
        every = texts.repeat_interleave(contexts, 0)
        shown = layout.taken & (layout.place < BLOCK)
        following = every.gather(1, torch.where(shown, layout.block * BLOCK + layout.place + 1, 0))
        targets = torch.cat([following, every[:, 1 - BLOCK :]], 1)
        counts = torch.cat([shown, torch.ones_like(every[:, 1 - BLOCK :], dtype=torch.bool)], 1)
        found = losses.surprise(self.read(context, layout.taken, tokens[:, -BLOCK:-1]), targets)
        ahead = found[:, -BLOCK:].mean(1).view(rows, contexts)

        scores = self.lens(context.detach(), layout.taken, layout.share)
        seen = by_block(scores.float(), layout, blocks).view(rows, contexts, blocks)
        return (found * counts).sum() / counts.sum(), losses.utilities(seen, expanded), ahead

    def read(self, context: Tensor, taken: Tensor, following: Tensor) -> Tensor:
        """Give logits of what follows each slot of contexts, and each of the tokens that are read after them.

        ``following``, (texts, tokens, width), are the embeddings of the latter: the same for all contexts of a text.
        """
        texts, many, _ = following.shape
        block = torch.full((1, many), self.frame.blocks, device=context.device)
        following = following + self.model.place(block, torch.arange(many, device=context.device).unsqueeze(0))
        following = following.repeat_interleave(context.shape[0] // texts, 0)
        seen = torch.cat([taken, taken.new_ones(following.shape[:2])], 1)
        logits: Tensor = self.model(torch.cat([context, following], 1), seen)
        return logits

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Give the context of the step's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.training.optimization.use_bf16)

    # -- between the steps -----------------------------------------------------------------------------------------

    def before(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the contexts through which the next step reads its texts; outside of the step, since it branches.

        One is the allocator's, one shows the newest blocks, and the others blocks drawn at random.
        """
        texts = texts.to(self.device)
        contexts = [self.focused(texts[:, :-BLOCK]).expanded, self.frame.newest(len(texts), self.device)]
        contexts += [self.frame.drawn(len(texts), self.device) for _ in range(self.focus.contexts - len(contexts))]
        return texts, torch.stack(contexts, 1)

    @torch.no_grad()
    def focused(self, texts: Tensor) -> Focused:
        """Let the allocator focus texts (rows, blocks x BLOCK), from the newest blocks on."""
        rows = len(texts)
        with self.precision():
            tokens = self.model.tokens(texts)
            # The allocator's cache: kept over all of the lens's calls.
            gists = hotloop.own(self.gist(tokens.view(rows * self.frame.blocks, BLOCK, -1)))
            gists = gists.view(rows, self.frame.blocks, -1)

            def score(layout: Any) -> Tensor:
                context = fill(layout, tokens, gists) + self.model.place(layout.block, layout.place)
                scores: Tensor = self.lens(context, layout.taken, layout.share)
                return scores

            start = self.frame.newest(rows, self.device)
            return focus(score, start, self.frame, rounds=self.focus.rounds, edits=self.focus.edits)

    # -- what it came to -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Give the loss of the tokens that follow held-out texts, focused in each of the ways at equal budget."""
        found = {way: self.heldout(way) for way in WAYS}
        return {"loss": found["lens"], **{f"loss_{way}": found[way] for way in WAYS[1:]}}

    def heldout(self, way: str) -> float:
        """Give the mean loss in nats a token of what follows the held-out texts."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.run.seed)
            return float(torch.cat([self.ahead(texts, self.chosen(way, texts)) for texts in self.held_out()]).mean())

    def held_out(self) -> Iterator[Tensor]:
        """Give the held-out windows in batches."""
        for part in self.data.validation.split(self.training.eval_batch_size):
            yield part.to(self.device)

    def chosen(self, way: str, texts: Tensor) -> Tensor:
        """Focus windows in one of the ways; gives (rows, blocks)."""
        if way == "lens":
            return self.focused(texts[:, :-BLOCK]).expanded
        return getattr(self.frame, {"recency": "newest", "random": "drawn"}[way])(len(texts), self.device)

    @torch.no_grad()
    def ahead(self, texts: Tensor, expanded: Tensor) -> Tensor:
        """Give the loss of what follows windows that are read through one context each: (rows,)."""
        with self.precision():
            layout = lay_out(expanded, self.frame)
            tokens = self.model.tokens(texts)
            gists = self.gist(tokens[:, :-BLOCK].reshape(-1, BLOCK, tokens.shape[-1])).view(*expanded.shape, -1)
            context = fill(layout, tokens[:, :-BLOCK], gists) + self.model.place(layout.block, layout.place)
            logits = self.read(context, layout.taken, tokens[:, -BLOCK:-1])
        return losses.surprise(logits[:, -BLOCK:], texts[:, -BLOCK:]).mean(1)
