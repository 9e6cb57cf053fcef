import pytest
from report_documents import HOSTILE, fresh, whole_run


@pytest.fixture
def empty():
    return fresh()


@pytest.fixture
def document():
    return whole_run()


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
