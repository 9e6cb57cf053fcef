"""Attention runs in another form than the fused one that torch has for it."""

from __future__ import annotations

from collections.abc import Mapping

from hotloop.diagnose.faster_way import faster, place_in
from hotloop.diagnose.other_form import gain
from hotloop.diagnose.rule import Case, Found, Problem, Rule
from hotloop.diagnose.words import count, figure

ALL_KERNELS, NO_WEIGHTS = "all attention kernels", "no attention weights"
_ROUNDS = "it rounds otherwise in the last bits"


class SlowerAttention(Rule):
    problems = (
        Problem(
            rule="slower_attention",
            kind="kernels",
            symptom="a kernel of attention is switched off that would be faster",
            cause="sdpa_kernel(...) around the call, or torch.backends.cuda.enable_*_sdp(False), leaves a slower one; "
            "the math kernel computes attention by products and a softmax, each written to memory",
            cost="the difference at every step",
            change=f"leave the choice to torch: take sdpa_kernel and enable_*_sdp(False) out; {_ROUNDS}",
        ),
        Problem(
            rule="slower_attention",
            kind="weights",
            symptom="nn.MultiheadAttention returns weights that nothing needs",
            cause="need_weights=True, its default, computes attention by products and a softmax, since fused kernels "
            "return no weights",
            cost="the difference at every step",
            change=f"call it with need_weights=False; {_ROUNDS}",
        ),
        Problem(
            rule="slower_attention",
            kind="manual",
            symptom="attention is computed by products and a softmax",
            cause="scores and weights are written to memory, queries times keys; a fused kernel keeps them on the chip",
            cost="the difference of each call, measured at its shape without mask and dropout",
            change="call torch.nn.functional.scaled_dot_product_attention; in transformers "
            f'attn_implementation="sdpa" in from_pretrained or the config; {_ROUNDS}',
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield an advice for each form of attention that was measured to be slower."""
        ways = (("kernels", ALL_KERNELS, "with all kernels"), ("weights", NO_WEIGHTS, "without returning weights"))
        for kind, way, how in ways:
            if advice := faster(case, way, self.problem(kind), how):
                yield advice
        entries = case.measurements.get("attention")
        for one in entries if isinstance(entries, list | tuple) else ():
            figures = one if isinstance(one, Mapping) else {}
            if found := gain(case, figures, "fused_"):
                heads, queries, keys = (figures.get(name) for name in ("heads", "queries", "keys"))
                yield self.problem("manual").advice(
                    f"attention of {queries} places to {keys}, {heads} heads in all, takes {figure(found.took)} ms "
                    f"forward and backward, fused {figure(found.other)}; a step has {count(found.calls, 'such call')}",
                    milliseconds=found.milliseconds,
                    **place_in(figures),
                )
