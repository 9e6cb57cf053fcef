import math

import pytest
from report_documents import FILE, HOSTILE, fresh

from hotloop.events import Compiled, Fallback, GraphBreak, Recompiled


@pytest.fixture
def empty():
    return fresh()


@pytest.fixture
def document():
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


@pytest.fixture
def hostile():
    long = "/very/long/" + "x" * 300 + "/" + "deep/" * 50 + "モデル.py"
    return fresh(
        status=HOSTILE,
        error=HOSTILE,
        starts="two",
        unread_lines=[1],
        settings={"recipe": HOSTILE, HOSTILE: HOSTILE, "deep": {"a": [HOSTILE]}},
        told={HOSTILE: [HOSTILE, {HOSTILE: 1}], "many": [HOSTILE] * 300, "odd": HOSTILE, "none": None},
        environment={HOSTILE: {HOSTILE: HOSTILE}},
        steps=[
            {
                "step": step,
                "seconds": "nan" if step == 3 else step,
                "loss": ["nan", "inf", 1.0, -2.0, None, HOSTILE][step % 6],
                "running": HOSTILE,
            }
            for step in range(20)
        ],
        metrics=[{"step": 5, "split": HOSTILE, HOSTILE: 0.5, "huge": 1e300, "text": HOSTILE}],
        events=[
            {
                "kind": HOSTILE,
                "component": HOSTILE,
                "reason": HOSTILE,
                "file": long,
                "line": 1,
                "hint": HOSTILE,
                "source": HOSTILE,
                "step": 3,
            },
            {"kind": "graph_break", "reason": HOSTILE * 50, "file": long, "line": HOSTILE, "step": 1e300},
            {"kind": ["list"], "step": "a"},
            {},
        ],
        components={
            HOSTILE: {
                "requested": HOSTILE,
                "running": "x" * 500,
                "state": HOSTILE,
                "causes": [{"reason": HOSTILE, "file": long}, HOSTILE],
            },
            "bare": {},
            "odd": {"causes": "none", "compiles": "many", "extra": {"a": HOSTILE}},
        },
        measurements={HOSTILE: 1, "big_bytes": 10**400, "text": HOSTILE},
        decisions=[{HOSTILE: HOSTILE, "reason": HOSTILE, "time": 1e300}],
        verdicts=[{"verdict": HOSTILE}],
    )
