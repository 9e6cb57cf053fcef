"""A vocabulary, or another large linear layer, has a size that is slow to multiply."""

from __future__ import annotations

from collections.abc import Mapping

from hotloop.diagnose.other_form import gain
from hotloop.diagnose.rule import Case, Found, Problem, Rule
from hotloop.diagnose.words import figure

_CAUSE = "tensor cores and the kernels around them want rows of 8, better of 64 numbers; others are copied or split"
_COST = "the difference of the layer's forward and backward, measured at the shape that the step uses"


class OddSize(Rule):
    problems = (
        Problem(
            rule="odd_size",
            kind="vocabulary",
            symptom="a vocabulary is no multiple of 64",
            cause=_CAUSE,
            cost=_COST,
            change="pad it to the next multiple of 64; it changes numerics a little: the words that are added are no "
            "target, and take part in the softmax until they are learnt away",
        ),
        Problem(
            rule="odd_size",
            kind="linear",
            symptom="a large linear layer has a size that is no multiple of 64",
            cause=_CAUSE,
            cost=_COST,
            change="pad it to the next multiple of 64; it changes numerics: the model has other sizes",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield an advice for each layer that was measured to be faster with padded sizes."""
        entries = case.measurements.get("linears")
        for one in entries if isinstance(entries, list | tuple) else ():
            figures = one if isinstance(one, Mapping) else {}
            sizes = [figures.get(name) for name in ("rows", "inner", "outer", "padded_inner", "padded_outer")]
            found = gain(case, figures, "padded_")
            if found is None or any(type(size) is not int for size in sizes):
                continue
            rows, inner, outer, padded_inner, padded_outer = sizes
            words = bool(figures.get("vocabulary")) and inner == padded_inner
            problem = self.problem("vocabulary" if words else "linear")
            change = f"write nn.Linear({padded_inner}, {padded_outer}, ...)"
            if words:
                change += f" and nn.Embedding({padded_outer}, ...)"
                if figures.get("resizes"):
                    resize = f"model.resize_token_embeddings({outer}, pad_to_multiple_of=64)"
                    change = f"call {resize} before the optimizer is made"
            name, often = figures.get("name"), "" if found.calls == 1 else f", {found.calls} times a step"
            yield problem.advice(
                f"{name}, {inner:,} to {outer:,}, takes {figure(found.took)} ms for {rows:,} rows, forward and "
                f"backward{often}; {padded_inner:,} to {padded_outer:,} takes {figure(found.other)}",
                change=f"{change}; {problem.change.partition('; ')[2]}",
                milliseconds=found.milliseconds,
            )
