"""Dropout between the layers of cuDNN's RNNs, whose random state is torch's own: shown by a kernel for the CPU."""

import array

import pytest
import torch
from step_programs import Both, engines
from torch import nn
from torch.nn import functional as F

STATE = torch.zeros(8, dtype=torch.uint8)
"""What torch keeps for each device, and hands to each call."""
HIDDEN = array.array("b")  # a list would be state of the step's in Python


@pytest.fixture
def cpu():
    with engines("cpu"):
        yield Both("cpu")


@pytest.fixture
def kernel():
    """Register a kernel for cuDNN's RNN on the CPU, which draws from the state that it is handed, and moves it."""
    library = torch.library.Library("aten", "IMPL")

    def run(x, *rest):
        hx, state = rest[3], rest[-1]
        if state is None:  # a state that nobody can reach
            HIDDEN.append(0)
            moved = torch.tensor(len(HIDDEN))
        else:
            state.add_(37)
            moved = state[0].long()
        dropped = x * ((torch.arange(x.numel()).view_as(x) * 5 + moved) % 3 > 0)
        return dropped, hx.clone(), x.new_empty(0), x.new_empty(0), x.new_empty(0)

    library.impl("_cudnn_rnn", run, "CPU")
    yield
    library._destroy()


def training(state, *, dropout=0.5):
    def program(run):
        STATE.zero_()
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
        hx = torch.zeros(1, 6, 8)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            with torch.no_grad():
                x = torch._cudnn_rnn(x, [hx], 1, None, hx, None, 2, 8, 0, 2, True, dropout, True, False, [], state)[0]
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        draws = torch.Generator().manual_seed(1)
        for _ in range(20):
            run.note(train_step(torch.randn(6, 8, generator=draws), torch.randint(4, (6,), generator=draws)))
        return {"model": model, "state": STATE.clone()}

    return program


@pytest.mark.usefixtures("kernel")
def test_the_random_state_is_put_back_in_proofs_and_replays_move_it_as_eager_does(cpu):
    cpu.equal(training(STATE), exact=True)


@pytest.mark.usefixtures("kernel")
def test_where_the_step_does_not_repeat_itself_the_dropout_is_named_with_what_to_write(cpu):
    run, _ = cpu.run(training(None), "eager+graph")
    told = run.declined[0]
    assert "an RNN drops between its layers" in told.reason
    assert "torch._cudnn_rnn(" in told.source
    assert "nn.Dropout(p)" in told.hint
