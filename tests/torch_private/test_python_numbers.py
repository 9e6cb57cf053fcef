"""Tensors of Python numbers that are made on the device: as torch makes them, without a copy from the host."""

import pytest
import torch

from hotloop._torch.python_numbers import MOST, filled, numbers_made_on_device

META = torch.device("meta")
NUMBERS = [
    3, -2.5, True, 1 + 2j, float("-inf"), [], [1, 2, 3], (0.1, 0.1, 7.0), [[1, 2], [3, 4]], [True, False], [2**53 + 1],
    [[0.0] * 8] * 4,
]  # fmt: skip


@pytest.mark.parametrize("data", NUMBERS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64, torch.complex64])
def test_a_filled_tensor_is_torchs_own(data, dtype):
    real = isinstance(data, complex) and dtype is not None and not dtype.is_complex
    host = torch.tensor(data, dtype=None if real else dtype)
    made = filled(host, torch.device("cpu"))
    assert (made.dtype, made.shape) == (host.dtype, host.shape)
    assert torch.equal(made, host)


def test_what_is_no_number_is_filled_too():
    assert filled(torch.tensor([1.0, float("nan")]), torch.device("cpu")).isnan().tolist() == [False, True]


@pytest.mark.parametrize("data", NUMBERS)
def test_nothing_is_copied_in_the_block(data, monkeypatch):
    expected, asked, tensor = torch.tensor(data, device=META), [], torch.tensor

    def noted(*args, device=None, **more):
        asked.append(device)
        return tensor(*args, device=device, **more)

    monkeypatch.setattr(torch, "tensor", noted)
    monkeypatch.setattr(torch, "as_tensor", lambda *_args, **_more: pytest.fail("copies"))
    with numbers_made_on_device():
        ones = [torch.tensor(data, device=META), torch.as_tensor(data, device="meta")]
        with META:
            ones.append(torch.tensor(data))
    assert set(asked) == {"cpu"}
    assert all((one.dtype, one.shape, one.device) == (expected.dtype, expected.shape, META) for one in ones)
    assert torch.tensor is noted


def test_new_tensor_takes_dtype_and_device_of_its_tensor():
    like = torch.ones(2, dtype=torch.int8, device=META)
    with numbers_made_on_device():
        made, other = like.new_tensor([1, 2]), like.new_tensor(0.5, dtype=torch.float64, requires_grad=True)
    assert (made.dtype, made.device, made.shape) == (torch.int8, META, (2,))
    assert (other.dtype, other.requires_grad, other.is_leaf) == (torch.float64, True, True)


def test_what_is_no_short_list_of_numbers_is_left_to_torch():
    with numbers_made_on_device():
        with pytest.warns(UserWarning, match="copy construct"):
            assert torch.tensor(torch.ones(2), device=META).shape == (2,)
        assert torch.tensor([1.0] * (MOST + 1), device=META).shape == (MOST + 1,)
        assert torch.tensor([3, 4]).tolist() == [3, 4]
        assert torch.ones(2).new_tensor([5]).tolist() == [5.0]
        with pytest.raises(TypeError):
            torch.tensor("text", device=META)
        with pytest.raises(TypeError):
            torch.tensor(1.0, device=META, dtyp=torch.int8)
