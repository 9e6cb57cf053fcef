"""Constants that a recording copies to the device from memory of its own; the meta device stands for a GPU."""

import contextlib

import pytest
import torch

from hotloop._torch.host_constants import FEW, HostConstants, room_for

META = torch.device("meta")
NUMBERS = [
    3, -2.5, True, 1 + 2j, float("-inf"), [], [1, 2, 3], (0.1, 0.1, 7.0), [[1, 2], [3, 4]], [True, False], [2**53 + 1],
    [[0.0] * 8] * 4,
]  # fmt: skip
MOVED = {
    "device": lambda one: one.to(META),
    "text": lambda one: one.to("meta"),
    "keyword": lambda one: one.to(device=META, dtype=torch.float64),
    "dtype": lambda one: one.to(META, torch.bfloat16),
    "flags": lambda one: one.to("meta", torch.int64, True, True),
    "other": lambda one: one.to(torch.empty(1, dtype=torch.float64, device=META)),
}


@pytest.fixture
def held(monkeypatch):
    """What the constants were copied from, in order."""
    kept, real = [], HostConstants._held

    def noted(self, host):
        kept.append(real(self, host))
        return kept[-1]

    monkeypatch.setattr(HostConstants, "_held", noted)
    return kept


@contextlib.contextmanager
def constants(nbytes=4096):
    with HostConstants(nbytes).copied_from():
        yield


@pytest.mark.parametrize("data", NUMBERS)
def test_python_numbers_are_copied_from_memory_that_is_kept(data, held):
    expected, there = torch.tensor(data), torch.tensor(data, device=META)
    with constants():
        made = [torch.tensor(data, device=META), torch.as_tensor(data, device="meta")]
        with META:
            made.append(torch.tensor(data))
    assert all((one.dtype, one.shape, one.device) == (there.dtype, there.shape, META) for one in made)
    assert len(held) == 3
    assert all(one.dtype == expected.dtype and torch.equal(one, expected) for one in held)


@pytest.mark.parametrize("way", MOVED)
@pytest.mark.parametrize(
    "make", [lambda: torch.arange(6), lambda: torch.ones(2, 3).t(), lambda: torch.ones(1).expand(4)]
)
def test_what_was_made_on_the_host_is_moved_from_memory_that_is_kept(way, make, held):
    expected = MOVED[way](make())
    with constants():
        moved = MOVED[way](make())
    assert (moved.dtype, moved.shape, moved.stride()) == (expected.dtype, expected.shape, expected.stride())
    (one,) = held
    assert torch.equal(one, make().to(expected.dtype))


def test_what_is_no_constant_is_left_to_torch(held):
    with constants():
        with pytest.warns(UserWarning, match="copy construct"):
            assert torch.tensor(torch.ones(2), device=META).shape == (2,)
        assert torch.tensor([1.0] * (FEW + 1), device=META).shape == (FEW + 1,)
        assert torch.tensor([3, 4]).tolist() == [3, 4]
        assert torch.ones(2).to(torch.int64).tolist() == [1, 1]
        assert torch.ones(2).to("cpu", torch.int64).tolist() == [1, 1]
        assert torch.ones(2, requires_grad=True).to(META).requires_grad
        with pytest.raises(TypeError):
            torch.tensor("text", device=META)
        with pytest.raises(TypeError):
            torch.tensor(1.0, device=META, dtyp=torch.int8)
        with pytest.raises(TypeError):
            torch.ones(2).to(META, dtyp=torch.int8)
    assert len(held) <= 1  # the last one fails in torch's own call


def test_what_finds_no_room_is_left_to_torch(held):
    with constants(room_for(24)):
        assert torch.arange(3).to(META).shape == (3,)
        assert torch.arange(3).to(META).shape == (3,)
        assert torch.tensor(2.0, device=META).device == META
    assert [one is None for one in held] == [False, True, True]
