"""Run records to draw, shared by the tests of both renderers."""

import math

from hotloop import record
from hotloop.events import Compiled, Fallback, GraphBreak, Recompiled

FILE = "/home/ana/projects/criteria/src/encoder.py"
HOSTILE = "<script>alert(1)</script>\"'&</style>\u2028\u202egnp\x1b[31m 模型 🚀 \ud800"


def fresh(**fields):
    document = record.empty()
    document.update(
        {"status": "finished", "created": 1.78e9, "updated": 1.78e9 + 90, "finished": 1.78e9 + 90, **fields}
    )
    return document


def whole_run():
    """A run of 200 steps that compiled, recompiled in step 12 and stepped down in step 120."""
    steps = []
    for step in range(200):
        seconds = {0: 20.0, 12: 6.0, 120: 4.0}.get(step, 0.03)
        running = "triton" if step <= 120 else "inductor"
        steps.append(
            {"step": step, "seconds": seconds, "loss": math.exp(-step / 90), "learning_rate": 3e-4, "running": running}
        )
    model = {"component": "model", "file": FILE}
    events = [
        Compiled(**model, frame="0", function="forward", line=40, seconds=12.0),
        Compiled(**model, frame="1", function="head", line=90, seconds=3.0, phase="backward"),
        GraphBreak(
            **model, line=88, source="if mask.sum().item() > 0:", reason="Tensor.item()", hint="use torch.where"
        ),
        Recompiled(**model, function="forward", line=40, reason="size mismatch at index 1", nth=1),
        Fallback(
            **model,
            scope="component",
            from_preset="triton",
            to_preset="inductor",
            stage="run",
            reason="capture failed",
            line=71,
        ),
    ]
    causes = [
        {
            "reason": "capture failed",
            "stage": "run",
            "file": FILE,
            "line": 71,
            "source": "x = y.cpu()",
            "hint": "log after the step",
        }
    ]
    return fresh(
        settings={"recipe": "criteria", "training": {"batch_size": 32, "bf16": False}, "compile": {"preset": "triton"}},
        told={
            "data": ["36 pairs in 9 groups", "left out 1 pair of p.csv:", "  line 3: no label"],
            "model": ["a small one"],
        },
        environment={"torch": "2.13.0", "gpu": "NVIDIA H200"},
        steps=steps,
        metrics=[
            {"step": 100, "epoch": 1, "split": "validation", "loss": 0.4, "f1": 0.85, "support": 400},
            {"step": 199, "epoch": 2, "split": "validation", "loss": 0.5, "f1": 0.81, "support": 400},
        ],
        events=[{**event.to_dict(), "step": step} for event, step in zip(events, (0, 0, 0, 12, 120), strict=True)],
        components={
            "model": {
                "requested": "triton",
                "running": "inductor",
                "state": "partial",
                "compiles": 3,
                "frames_compiled": 200,
                "frames_eager": 4,
                "recompiles": 1,
                "compile_seconds": 15.0,
                "causes": causes,
            },
            "loss": {"requested": "none", "running": "none", "state": "eager", "causes": []},
        },
        measurements={"cold_seconds": 22.5, "peak_memory_bytes": 3 * 2**30, "invented_per_second": 5, "odd": "nan"},
        decisions=[{"step": 3, "choice": "inductor", "reason": "pays from step 40 on", "saved_ms": 12.5}],
        verdicts=[{"verdict": "equal", "reason": "within the error ratio", "file": FILE, "line": 9}],
    )
