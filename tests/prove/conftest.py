from pathlib import Path

import pytest
import torch

PROGRAMS = Path(__file__).with_name("doctor_programs.py")


@pytest.fixture
def line_of():
    """Return a function that finds the number of the line of the programs that carries a mark."""
    lines = PROGRAMS.read_text(encoding="utf-8").splitlines()

    def find(mark):
        found = [number for number, text in enumerate(lines, start=1) if text.endswith(f"# {mark}")]
        assert len(found) == 1, mark
        return found[0]

    return find


@pytest.fixture
def program():
    return lambda name: f"{PROGRAMS}:{name}"


@pytest.fixture(autouse=True)
def _torchs_own_settings():
    """Restore torch's settings, which programs under examination change."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
