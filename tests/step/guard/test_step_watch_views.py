"""A tensor that becomes another view of its memory between two replays: its address stays, its shape or strides do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hotloop._torch import views as torchs
from hotloop._torch.ledger import CapabilityMissingError
from hotloop.step.state.holdings import Memory, Views

STEPS, AT = 22, 14


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = nn.Parameter(torch.randn(2, 8))
        self.register_buffer("turn", torch.randn(4, 4))


def of_weight_data(model, optimizer, beside):
    model.first.weight.data = model.first.weight.data.t()


@torch.no_grad()
def of_weight(model, optimizer, beside):
    model.first.weight.t_()


def of_tied_weight(model, optimizer, beside):
    model.last.weight.data = model.first.weight.data.t()


def of_a_weight_that_is_viewed(model, optimizer, beside):
    model.own.data = model.own.data.view(4, 4)


def of_a_buffer(model, optimizer, beside):
    model.turn.t_()


def of_state(model, optimizer, beside):
    optimizer.state[model.first.weight]["momentum_buffer"].t_()


def of_what_the_step_reads(model, optimizer, beside):
    beside["turn"].t_()


def of_a_row_of_it(model, optimizer, beside):
    beside["row"].squeeze_(0)


def of_its_size(model, optimizer, beside):
    beside["bank"].resize_(1, 4)


CHANGES = [
    of_weight_data,
    of_weight,
    of_tied_weight,
    of_a_weight_that_is_viewed,
    of_a_buffer,
    of_state,
    of_what_the_step_reads,
    of_a_row_of_it,
    of_its_size,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_view_that_changes_at_the_same_address_drops_the_recording(both, change):
    def program(run):
        model = Net().to(run.device)
        beside = {
            "turn": torch.randn(4, 4, device=run.device),
            "row": torch.randn(1, 4, device=run.device),
            "bank": torch.arange(8.0, device=run.device).view(2, 4),
        }
        viewed = change is of_a_weight_that_is_viewed  # which state would not fit, in eager as well
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0625, momentum=0 if viewed else 0.5)

        @run.loop(model, optimizer).step
        def train_step(x):
            found = model.last(model.first(x @ beside["turn"] @ model.turn)) * beside["row"].ndim
            own = x @ (model.own if model.own.shape == (4, 4) else model.own.view(4, 4).t())
            bank = beside["bank"]
            loss = 0.0625 * (found + own + beside["row"].sum() - bank.mean(0) * bank.shape[0]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for number in range(STEPS):
            if number == AT:
                change(model, optimizer, beside)
            run.note(train_step(torch.randn(8, 4, device=run.device)))
        return model, optimizer

    run = both.equal(program, replays=6)
    assert len(run.dropped) == 1


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_a_gradient_that_is_turned_between_two_accumulating_steps_is_added_to_as_it_is(both):
    def program(run):
        model = nn.Linear(4, 4).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)

        @run.loop(model, optimizer).step
        def train_step(x, update):
            loss = (model(x) - 1).square().mean()
            loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        for number in range(40):
            run.note(train_step(torch.randn(8, 4, device=run.device), number % 2 == 1))
            if number >= 28 and number % 2 == 0:
                model.weight.grad.t_()
        return model

    both.equal(program, replays=12)


def test_what_was_turned_is_brought_back_with_its_values():
    tensor = torch.arange(9.0).view(3, 3)
    memory, at, values = Memory([tensor]), tensor.data_ptr(), tensor.t().clone()
    tensor.t_()
    assert memory.moved() == [0]
    memory.bring_back()
    assert (tensor.data_ptr(), tensor.stride()) == (at, (3, 1))
    assert torch.equal(tensor, values)
    assert memory.moved() == []


def test_what_was_given_another_shape_cannot_be_brought_back():
    tensor = torch.arange(9.0).view(3, 3)
    memory = Memory([tensor])
    tensor.resize_(1, 3)
    with pytest.raises(RuntimeError, match=r"of \(3, 3\) was given the shape \(1, 3\)"):
        memory.bring_back()


TURNS = [
    lambda one: one.t_(),
    lambda one: one.resize_(2, 2),
    lambda one: one.unsqueeze_(0),
    lambda one: setattr(one, "data", one.data.view(torch.int32)),
    lambda one: one.set_(torch.empty(4, 4)),
    lambda one: setattr(one, "data", one.data.as_strided((2, 8), (4, 1))),
]


@pytest.fixture(params=["guard", "no guard"])
def guarded(request, monkeypatch):
    if request.param == "guard":
        assert torchs.guard([torch.zeros(2)]) is not None
        return

    def missing(path):
        raise CapabilityMissingError(path)

    monkeypatch.setattr(torchs, "private", missing)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("looks", [0, 2])
def test_each_change_of_a_view_is_seen(turn, place, looks):
    tensors = [torch.randn(4, 4), torch.randn(4, 4).requires_grad_(), torch.randn(4, 4).as_subclass(Strange)]
    views = Views([*tensors, tensors[0], torch.eye(2).to_sparse(), torch.tensor(0.0), torch.randn(3)])
    assert all(views.same() for _ in range(looks))
    one = tensors[place]
    if one.requires_grad and place == 1:
        one.requires_grad_(requires_grad=False)
        assert views.same()
    turn(one)
    assert not views.same()


class Strange(torch.Tensor):
    """A tensor of somebody's own."""


@pytest.mark.usefixtures("guarded")
def test_a_mode_of_torchs_that_comes_or_goes_is_no_change_of_a_view():
    views = Views([nn.Parameter(torch.randn(4, 4)), torch.randn(2)])
    for _ in range(6):
        assert views.same()
        with torch.no_grad():
            assert views.same()
        with torch.inference_mode():
            assert views.same()
        with torch.autocast("cpu"):
            assert views.same()


def test_what_was_swapped_for_a_tensor_without_an_address_is_seen():
    tensor = torch.eye(3)
    views = Views([tensor])
    assert views.same()
    other = torch.eye(3).to_sparse()
    torch.utils.swap_tensors(tensor, other)
    assert not views.same()


def test_parameters_may_be_swapped_while_a_recording_is_in_force(both):
    """torch swaps no tensor that has weak references."""

    def program(run):
        model = Net().to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)

        @run.loop(model, optimizer).step
        def train_step(x):
            loss = model.last(model.first(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for number in range(STEPS):
            if number == AT:
                torch.__future__.set_swap_module_params_on_conversion(True)
                try:
                    model.load_state_dict({name: 0.5 * one for name, one in model.state_dict().items()})
                finally:
                    torch.__future__.set_swap_module_params_on_conversion(False)
            run.note(train_step(torch.full((4, 4), number / STEPS, device=run.device)))
        return model, optimizer

    both.equal(program, exact=True)
