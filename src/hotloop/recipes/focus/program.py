"""The focus controller as a program: its training step, the allocator between the steps, and its figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

from hotloop.compiling.control import own
from hotloop.recipes.focus import losses
from hotloop.recipes.focus.allocator import Focused, focus
from hotloop.recipes.focus.context import BLOCK, Frame, by_block, fill, lay_out
from hotloop.recipes.focus.networks import Gist, Lens, Reader
from hotloop.train.optimizing import Rate, make_optimizer, parameter_groups

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from hotloop.recipes.focus.context import Layout
    from hotloop.train.settings import Settings

WAYS = ("lens", "recency", "random")
"""How held-out texts are focused: by the allocator, on the newest blocks, on blocks drawn at random."""


class Data(NamedTuple):
    """Texts as tokens, int64 of shape (texts, blocks x BLOCK + BLOCK): to learn from, and to judge by."""

    train: Tensor
    validation: Tensor


class Controller:
    """A language model that reads through a budget, and the two networks that decide what it sees.

    Args:
        settings: of the run.
        vocabulary: how many tokens there are.
        data: the texts.
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
        self.optimizer = make_optimizer(self.training, parameter_groups(networks, self.training.weight_decay))
        self.rate = Rate(self.optimizer, self.training)
        self.last: dict[str, float] = {}
        """The newest figures of `metrics`."""

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
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm or torch.inf, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # What a run keeps of a step, its telemetry, outlives the next one's calls.
        told = {"loss": loss, "next_token": next_token, "preference": preferred, "agreement": agreement}
        return own({name: one.detach() for name, one in told.items()})

    def judged(self, texts: Tensor, expanded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean loss of all tokens, what the lens makes of the contexts, and what came of each.

        The latter two as `losses.preference` takes them.
        """
        rows, contexts, blocks = expanded.shape
        expanded = expanded.flatten(0, 1)
        layout = lay_out(expanded, self.frame)
        tokens = self.model.tokens(texts)
        gists = self.gist(tokens[:, :-BLOCK].reshape(rows * blocks, BLOCK, -1)).view(rows, blocks, -1)
        context = fill(layout, tokens[:, :-BLOCK], gists) + self.model.place(layout.block, layout.place)

        found, counts = self.read(context, layout, texts, tokens[:, -BLOCK:-1])
        ahead = found[:, -BLOCK:].mean(1).view(rows, contexts)

        shown = (tokens[:, :-BLOCK], gists, self.model.everywhere())
        scores, _ = self.lens(*(one.detach() for one in shown), expanded)
        seen = by_block(scores.float(), layout, blocks)
        worth = losses.utilities(*(one.view(rows, contexts, blocks) for one in (seen, expanded)))
        return (found * counts).sum() / counts.sum(), worth, ahead

    def read(self, context: Tensor, layout: Layout, texts: Tensor, behind: Tensor) -> tuple[Tensor, Tensor]:
        """Read contexts and, after each, the last block of its text; gives the loss of what follows each slot.

        Args:
            context: (texts x contexts, budget, width).
            layout: of the contexts.
            texts: (texts, blocks x BLOCK + BLOCK).
            behind: embeddings of the last block's tokens but the last, (texts, BLOCK - 1, width).

        Returns:
            losses of shape (texts x contexts, slots), those of the last block at the end, and which of them count.
        """
        rows, many = context.shape[0], behind.shape[1]
        block = torch.full((1, many), self.frame.blocks, device=context.device)
        behind = behind + self.model.place(block, torch.arange(many, device=context.device).unsqueeze(0))
        several = (-1, rows // len(texts))
        texts = texts.unsqueeze(1).expand(*several, -1).flatten(0, 1)
        behind = behind.unsqueeze(1).expand(*several, -1, -1).flatten(0, 1)
        shown = layout.taken & (layout.place < BLOCK)
        at = torch.where(shown, layout.block * BLOCK + layout.place, 0)
        last, ones = texts[:, -BLOCK:], shown.new_ones(rows, many)
        tokens = torch.cat([torch.where(shown, texts.gather(1, at), -1), last[:, :-1]], 1)
        following = torch.cat([texts.gather(1, at + 1), last[:, 1:]], 1)
        found = self.model(torch.cat([context, behind], 1), torch.cat([layout.taken, ones], 1), tokens, following)
        return found, torch.cat([shown, ones], 1)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the step's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16-mixed")

    # -- between the steps -----------------------------------------------------------------------------------------

    def before(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the contexts through which the next step reads its texts; outside of it, without gradients.

        They are the allocator's, the newest blocks, and, by turns, the newest but for one, and blocks drawn at random.
        """
        texts = texts.to(self.device)
        focused = self.focused(texts[:, :-BLOCK]).expanded
        others = [self.frame.newest(len(texts))]
        for number in range(self.focus.contexts - 2):
            other = self.frame.drawn if number % 2 else self.frame.exchanged
            others.append(other(len(texts)))
        # Drawn while a GPU is at the allocator's calls, and taken there without waiting for their end.
        drawn = torch.stack(others, 1).to(self.device, non_blocking=True)
        return texts, torch.cat([focused.unsqueeze(1), drawn], 1)

    @torch.no_grad()
    def focused(self, texts: Tensor) -> Focused:
        """Let the allocator focus texts (rows, blocks x BLOCK), from the newest blocks on."""
        rows = len(texts)
        with self.precision():
            tokens = self.model.tokens(texts)
            # The allocator's cache: kept over all of the lens's calls.
            gists = own(self.gist(tokens.view(rows * self.frame.blocks, BLOCK, -1)))
            gists = gists.view(rows, self.frame.blocks, -1)
            where = self.model.everywhere()

            def look(expanded: Tensor) -> tuple[Tensor, Tensor]:
                found: tuple[Tensor, Tensor] = self.lens(tokens, gists, where, expanded, self.focus.edits)
                return found

            return focus(look, self.frame.newest(rows, self.device), self.focus.rounds)

    def infer(self, texts: Tensor, expanded: Tensor) -> tuple[Tensor, ...]:
        """Focus the first text of a batch alone, and read on, as a reader does.

        Gives the scores of the first round and of the last, and the loss of what follows.
        """
        del expanded
        found = self.focused(texts[:1, :-BLOCK])
        return found.scores[0], found.scores[-1], self.ahead(texts[:1], found.expanded)

    # -- what it came to -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return the loss of the tokens that follow held-out texts, focused in each of the ways at equal budget."""
        found = {way: self.heldout(way) for way in WAYS}
        self.last = {"loss": found["lens"], **{f"loss_{way}": found[way] for way in WAYS[1:]}}
        return self.last

    def heldout(self, way: str) -> float:
        """Return the mean loss in nats a token of what follows the held-out texts."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.run.seed)
            return float(torch.cat([self.ahead(texts, self.chosen(way, texts)) for texts in self.held_out()]).mean())

    def held_out(self) -> Iterator[Tensor]:
        """Yield the held-out texts in batches."""
        size, held_out = self.training.eval_batch_size, self.data.validation
        for first in range(0, len(held_out), size):
            yield held_out[first : first + size].to(self.device)

    def chosen(self, way: str, texts: Tensor) -> Tensor:
        """Focus texts in one of the ways; gives (rows, blocks)."""
        if way == "lens":
            return self.focused(texts[:, :-BLOCK]).expanded
        make = {"recency": self.frame.newest, "random": self.frame.drawn}[way]
        return make(len(texts), self.device)

    @torch.no_grad()
    def ahead(self, texts: Tensor, expanded: Tensor) -> Tensor:
        """Return the loss of what follows texts that are read through one context each: (rows,)."""
        with self.precision():
            layout = lay_out(expanded, self.frame)
            tokens = self.model.tokens(texts)
            gists = self.gist(tokens[:, :-BLOCK].reshape(-1, BLOCK, tokens.shape[-1])).view(*expanded.shape, -1)
            context = fill(layout, tokens[:, :-BLOCK], gists) + self.model.place(layout.block, layout.place)
            found, _ = self.read(context, layout, texts, tokens[:, -BLOCK:-1])
        return found[:, -BLOCK:].mean(1)
