"""The examples are programs that train."""

from pathlib import Path

import pytest
import torch

from hotloop.step.workload import load_factory

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["classifier", "unet"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the data package reads its own files in an old way
def test_an_example_trains(name):
    torch.manual_seed(0)
    workload = load_factory(f"{EXAMPLES / name}.py:make")()
    batches = workload.endless()
    before = [one.detach().clone() for one in workload.models()["model"].parameters()]
    losses = [workload.run(next(batches)).item() for _ in range(3)]
    assert losses[-1] < losses[0]
    assert any(not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True))
