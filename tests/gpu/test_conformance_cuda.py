"""The conformance suites of all integrations on a GPU, whole steps in real CUDA graphs."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "integrations"))

import test_accelerate_conformance
import test_fabric_conformance
import test_lightning_conformance
import test_transformers_conformance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),
]


class OnGpu:
    device = "cuda"
    rtol, atol = 1e-4, 1e-5  # kernels of both ways round differently


class TestFabric(OnGpu, test_fabric_conformance.TestLoop):
    pass


class TestLightning(OnGpu, test_lightning_conformance.TestTrainer):
    pass


class TestHotTrainer(OnGpu, test_transformers_conformance.TestHotTrainer):
    pass


class TestAccelerate(OnGpu, test_accelerate_conformance.TestLoopAroundAccelerate):
    pass
