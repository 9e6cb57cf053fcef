"""CUDA graphs were asked for inside torch.compile, and Inductor left them out."""

from __future__ import annotations

import functools
import re
from typing import ClassVar

from hotloop import events as ev
from hotloop.diagnose.rule import Case, Found, Problem, Rule, grouped
from hotloop.diagnose.words import count

_skipped = functools.partial(
    Problem,
    rule="cudagraphs_skipped",
    cost="these graphs are launched kernel by kernel, at the speed of preset default",
    remedy="tier",
)


class CudagraphsSkipped(Rule):
    problems = (
        _skipped(
            kind="cpu",
            symptom="a tensor on the CPU keeps CUDA graphs out",
            cause="a CUDA graph holds GPU work only, and the model computes with a tensor on the CPU",
            change="make the tensor on the GPU (device=x.device), or move it there once, outside the model",
        ),
        _skipped(
            kind="devices",
            symptom="tensors on several devices keep CUDA graphs out",
            cause="a CUDA graph holds the work of one device",
            change="keep each compiled component on one device",
        ),
        _skipped(
            kind="mutation",
            symptom="an input that is changed in place keeps CUDA graphs out",
            cause="the graph would change its own copy of the input, not the caller's",
            change="copy the input inside the model before it is changed, or hold it as a buffer of the module",
        ),
        _skipped(
            kind="dynamic",
            symptom="dynamic shapes keep CUDA graphs out",
            cause="a CUDA graph is for exact sizes",
            change="pad to a few sizes and compile with dynamic=False",
        ),
        _skipped(
            kind="operator",
            symptom="an operator keeps CUDA graphs out",
            cause="the operator waits for the host or depends on values, which a replay cannot do",
            change="replace the operator (a mask instead of boolean indexing, torch.where instead of cond), or move "
            "it out of the model",
        ),
        _skipped(
            kind="other",
            symptom="CUDA graphs were left out",
            cause="Inductor names the reason",
            change="fix what the reason names, or ask for preset default, which uses no CUDA graphs",
        ),
    )
    torch_words: ClassVar = {
        "cpu": "cpu device",
        "devices": "multiple devices",
        "mutation": "mutated inputs|input storage mutation",
        "dynamic": "symbolic shapes|dynamic",
        "operator": "incompatible op|control flow operator|index_put_|sparsity",
    }  # patterns of torch's reason for each problem

    def find(self, case: Case) -> Found:
        """Yield one advice per reason and place."""
        skipped = [
            (event, self.kind_of(event.cudagraphs_skipped), self.place_in(event.cudagraphs_skipped))
            for event in case.of(ev.Compiled)
            if event.cudagraphs_skipped
        ]
        for group in grouped(skipped, lambda each: (each[0].component, *each[1:])):
            event, kind, (file, line, source) = group[0]
            reason = (event.cudagraphs_skipped or "").split("Found from")[0].strip().rstrip(".")
            yield self.problem(kind).advice(
                f"CUDA graphs were left out of {count(len(group), 'graph')}: {reason}",
                component=event.component,
                file=file,
                line=line,
                source=source,
                times=len(group),
            )

    def kind_of(self, reason: str) -> str:
        """Return the kind of the problem behind torch's reason."""
        return next((kind for kind, words in self.torch_words.items() if re.search(words, reason)), "other")

    def place_in(self, reason: str) -> tuple[str | None, int | None, str]:
        """Return file, line and text of the innermost stack frame in the reason that is not torch's."""
        frames = re.findall(r'File "([^"]+)", line (\d+)[^\n]*(?:\n\s*([^\n]+))?', reason)
        own = [frame for frame in frames if not re.search(r"[/\\]torch[/\\]", frame[0])]
        return (own[-1][0], int(own[-1][1]), own[-1][2].strip()) if own else (None, None, "")
