"""A module travels without its weights: its structure, ties, layout and small tables stay; what cannot is a reason."""

import sys
import threading

import cache_models
import numpy as np
import pytest
import torch
from cache_models import HoldsWeightsInReduce, Net
from torch import nn
from torch.utils.data import TensorDataset

from hotloop.cache import BackgroundUnavailableError
from hotloop.cache.portable import BY_VALUE_BYTES, Packer, build, globals_of, outline, unpack


def through(value):
    packer = Packer()
    pickled = packer.pack(value, "value")
    return unpack(pickled, build(packer.tensors)), packer, pickled


def layout(tensor):
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad, tensor.is_leaf)


def test_a_module_keeps_names_layout_ties_and_flags_but_not_its_weights():
    net = Net().eval()
    net.inner.weight.requires_grad_(False)
    net.norm.train()
    made, _, _ = through(net)
    assert type(made) is Net
    assert [(n, layout(p)) for n, p in made.named_parameters()] == [(n, layout(p)) for n, p in net.named_parameters()]
    assert made.head.weight is made.embed.weight
    assert [part.training for part in made.modules()] == [part.training for part in net.modules()]
    assert not torch.equal(made.embed.weight, net.embed.weight)
    assert made.embed.weight.std() > 0
    assert list(made.state_dict()) == list(net.state_dict())


def test_no_weight_is_in_the_pickle():
    large = nn.Linear(1000, 1000)
    _, packer, pickled = through(large)
    assert len(pickled) < 10_000
    assert all(storage.value is None for storage in packer.tensors.storages)
    assert packer.tensors.bytes_on("cpu") == 4 * 1_001_000


def test_small_tensors_that_are_no_parameters_travel_by_value():
    net = Net()
    net.norm.running_mean.uniform_()
    made, _, _ = through(net)
    assert torch.equal(made.positions, torch.arange(4))
    assert torch.equal(made.norm.running_mean, net.norm.running_mean)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.uint16])
def test_large_whole_numbers_are_random_in_their_range(dtype):
    given = torch.randint(0, 2, (BY_VALUE_BYTES,)).mul(1 if dtype is torch.bool else 7).to(dtype)
    made, packer, _ = through(torch.cat([given, given]))
    assert packer.tensors.storages[0].value is None
    assert (int(made.to(torch.int64).min()), int(made.to(torch.int64).max())) == (0, 1 if dtype is torch.bool else 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_large_floats_are_small_random_numbers(dtype):
    made, _, _ = through(torch.zeros(BY_VALUE_BYTES, 2).to(dtype))
    assert made.dtype == dtype
    assert 0 < made.to(torch.complex64).abs().max() < 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(10)[3:7],
        torch.randn(1, 5).expand(4, 5),
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(4, requires_grad=True),
        torch.randn(4, requires_grad=True) * 2,
        torch.empty(3, 4, device="meta"),
    ],
    ids=["channels last", "transposed", "offset", "expanded", "scalar", "empty", "leaf", "not leaf", "meta"],
)
def test_a_tensor_keeps_its_layout(tensor):
    made, _, _ = through(tensor)
    assert layout(made) == layout(tensor)
    assert made.device == tensor.device
    if tensor.device.type == "cpu":
        assert torch.equal(made, tensor)


def test_an_inference_tensor_stays_one():
    with torch.inference_mode():
        given = torch.ones(3)
    made, _, _ = through([given, torch.ones(3)])
    assert [tensor.is_inference() for tensor in made] == [True, False]


def test_what_shares_memory_still_does():
    base = torch.arange(10.0)
    (first, second, third), _, _ = through((base[:5], base[3:], torch.arange(2)))
    first[4] = 77
    assert second[1] == 77
    assert first.data_ptr() != third.data_ptr()


def test_a_small_slice_of_a_large_storage_does_not_bring_it_all():
    data = torch.zeros(10_000_000, dtype=torch.int64)
    data[70:80] = torch.arange(10)
    made, packer, _ = through(data[70:80])
    assert packer.tensors.bytes_on("cpu") < 1000
    assert made.storage_offset() % 16 == 70 % 16
    assert (made.min() >= 0).item()
    assert (made.max() <= 9).item()


def test_marks_of_dynamic_sizes_stay():
    given = torch.zeros(4, 5)
    torch._dynamo.mark_dynamic(given, 0, min=2, max=9)
    made, _, _ = through(given)
    assert vars(made) == vars(given)


def test_a_module_with_a_reduce_of_its_own_keeps_its_ties():
    inner = HoldsWeightsInReduce(3, 4)
    other = nn.Linear(3, 4)
    other.weight = inner.weight
    made, _, _ = through(nn.ModuleList([inner, other]))
    assert made[0].weight is made[1].weight


def test_hooks_that_can_be_found_stay():
    net = Net()
    net.register_forward_pre_hook(cache_models.hook)
    made, _, _ = through(net)
    assert list(made._forward_pre_hooks.values()) == [cache_models.hook]


SCALE = 3.0
ROWS = bytearray(65 * 2**20)


def local():
    class Inner(nn.Linear):
        def forward(self, x):
            return super().forward(x) * SCALE

    return Inner(2, 2)


def test_a_class_that_cannot_be_imported_travels_by_value_with_the_globals_that_it_names():
    net = local()
    net.register_forward_hook(lambda module, args, output: output + 1)
    made, _, pickled = through(net)
    assert len(pickled) < 10_000
    net.load_state_dict(made.state_dict())
    given = torch.ones(1, 2)
    assert torch.equal(made(given), net(given))


DATA = torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("held", [lambda rows: rows, lambda rows: {"train": [rows]}, TensorDataset])
def test_data_that_code_names_counts_though_tensors_travel_without_contents(monkeypatch, held):
    class Inner(nn.Linear):
        def forward(self, x):
            def inner(y):
                return y + len(DATA)

            return inner(super().forward(x))

    net = Inner(2, 2)
    monkeypatch.setitem(globals(), "DATA", held(torch.empty(63 * 2**20, dtype=torch.uint8)))
    through(net)
    monkeypatch.setitem(globals(), "DATA", held(torch.empty(65 * 2**20, dtype=torch.uint8)))
    with pytest.raises(BackgroundUnavailableError, match=r"more than 64 MiB .*or its code names them as a global"):
        through(net)


def test_a_model_that_code_names_counts_as_weights(monkeypatch):
    class Inner(nn.Linear):
        def forward(self, x):
            return super().forward(x) + DATA(x)

    monkeypatch.setitem(globals(), "DATA", nn.Linear(2, 9 * 2**20, device="meta"))
    through(Inner(2, 2))


def test_globals_of_a_module_that_is_not_there_are_those_of_an_empty_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_notebooks_cell", None)  # importing it fails
    known = globals_of("a_notebooks_cell")
    assert known["__name__"] == "a_notebooks_cell"
    assert globals_of("a_notebooks_cell") is known


def test_an_array_of_any_size_travels():
    net = nn.Linear(2, 2)
    net.table = np.arange(100_000.0)
    made, _, _ = through(net)
    assert np.array_equal(made.table, net.table)


def with_global_data():
    class Inner(nn.Linear):
        def forward(self, x):
            return super().forward(x) * len(ROWS)

    return Inner(2, 2)


def with_lock():
    net = nn.Linear(2, 2)
    net.lock = threading.Lock()
    return net


def with_data():
    net = nn.Linear(2, 2)
    net.rows = bytes(65 * 2**20)
    return net


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_lock, "cannot be pickled: TypeError.*lock"),
        (with_data, r"more than 64 MiB without its tensors.*or give Loop\(workload='file.py:make'\)"),
        (with_global_data, "more than 64 MiB without its tensors.*names them as a global"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            "parametrized modules is only supported through.*give Loop",
        ),
        (lambda: nn.LazyLinear(3), "not initialised"),
        (lambda: torch.ones(3).as_subclass(Wrapped), "Wrapped"),
        (lambda: torch.ones(3).to_sparse(), "sparse"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugate"),
    ],
)
def test_what_cannot_travel_is_a_reason(make, reason):
    with pytest.raises(BackgroundUnavailableError, match=reason):
        Packer().pack(make(), "component model")


def test_an_outline_knows_shapes_and_values_but_no_contents():
    one = outline(((torch.zeros(2, 3),), {"scale": 2.0}), "arguments")
    assert one == outline(((torch.ones(2, 3),), {"scale": 2.0}), "arguments")
    assert one != outline(((torch.zeros(3, 2),), {"scale": 2.0}), "arguments")
    assert one != outline(((torch.zeros(2, 3),), {"scale": 3.0}), "arguments")
    assert one != outline(((torch.zeros(2, 3, requires_grad=True),), {"scale": 2.0}), "arguments")
