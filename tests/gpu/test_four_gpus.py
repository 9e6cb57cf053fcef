"""Four processes, a GPU each, through NCCL: what tests/step shows of four gloo processes on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "step" / "ranks"))

from test_step_auto_peers import test_four_processes_decide_together
from test_step_captured_peers import test_four_processes_capture_together

__all__ = ["test_four_processes_capture_together", "test_four_processes_decide_together"]
FOUR = 4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < FOUR, reason="needs four GPUs of one host"),
]


@pytest.fixture(autouse=True, scope="module")
def _nccl():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEERS_BACKEND", "nccl")
        yield
