"""The assertions for users' test suites: each passes, and each fails with a message to act on."""

import pytest
import torch
from lifetime_programs import Net

import hotloop
from hotloop.errors import ConfigError
from hotloop.testing import (
    assert_compiled,
    assert_max_recompiles,
    assert_outputs_owned,
    assert_steps_marked,
    cudagraph_emulation,
)


def test_assert_compiled_passes_what_runs_as_asked_and_names_what_does_not():
    model = hotloop.compile(Net(), "aot_eager")
    with pytest.raises(AssertionError, match="model is pending, running aot_eager, not aot_eager: it was not called"):
        assert_compiled(model)
    model(torch.ones(2, 8))
    assert_compiled(model)
    with pytest.raises(AssertionError, match="Net was not compiled"):
        assert_compiled(Net())


def test_assert_compiled_gives_the_cause_of_a_component_that_ran_eager():
    def broken(x):
        torch._dynamo.graph_break()
        return x

    function = hotloop.compile(broken, "aot_eager")
    function(torch.ones(2))
    with pytest.raises(AssertionError, match=r"running none, not aot_eager: .*no tensor operation of function reached"):
        assert_compiled(function)


def test_assert_max_recompiles_counts_recompiles_and_lists_their_reasons():
    model = hotloop.compile(Net(), "aot_eager", dynamic=False)
    with assert_max_recompiles(0):
        model(torch.ones(2, 8))
        model(torch.ones(2, 8))
    with assert_max_recompiles(1):
        model(torch.ones(3, 8))
    with (
        pytest.raises(AssertionError, match=r"2 recompiles, at most 1 were expected:\n.*size mismatch") as raised,
        assert_max_recompiles(1),
    ):
        model(torch.ones(4, 8))
        model(torch.ones(5, 8))
    assert str(raised.value).count("\n") == 2


def test_assert_max_recompiles_fails_at_the_recompile_limit():
    model = hotloop.compile(Net(), "aot_eager", dynamic=False)
    limited = torch._dynamo.config.patch(recompile_limit=2)
    with limited, pytest.raises(AssertionError, match="recompile limit"), assert_max_recompiles(100):
        for rows in range(2, 8):
            model(torch.ones(rows, 8))


@pytest.mark.parametrize("n", [-1, 1.5, True, "2"])
def test_assert_max_recompiles_wants_a_number_of_times(n):
    with pytest.raises(ConfigError, match="expected a whole number, 0 or more"), assert_max_recompiles(n):
        pass


@pytest.mark.parametrize("assertion", [assert_steps_marked, assert_outputs_owned])
def test_the_assertions_about_cuda_graphs_need_the_emulation_and_a_graph_that_runs(assertion):
    with pytest.raises(ConfigError, match="cudagraph_emulation"), assertion():
        pass
    with cudagraph_emulation(), pytest.raises(AssertionError, match="no CUDA graph ran"), assertion():
        Net()(torch.ones(2, 8))


def test_calls_that_go_through_the_helper_pass_and_one_that_does_not_is_found():
    with cudagraph_emulation() as emulation, torch.no_grad():
        compiled = torch.compile(Net(), backend=emulation.backend)
        with assert_steps_marked(), assert_outputs_owned():
            kept = [hotloop.own(compiled(torch.ones(2, 8))) for _ in range(3)]
        with (
            pytest.raises(AssertionError, match=r"1 outputs of CUDA graphs were held past their step.*\n.*output 0"),
            assert_outputs_owned(),
        ):
            kept.append(compiled(torch.ones(2, 8)))
            hotloop.own(compiled(torch.ones(2, 8)))
        with pytest.raises(AssertionError, match="still held at the end"), assert_outputs_owned():
            kept.append(compiled(torch.ones(2, 8)))


def test_calls_without_a_mark_are_found_with_their_line():
    with cudagraph_emulation() as emulation, torch.no_grad():
        compiled = torch.compile(Net(), backend=emulation.backend)
        with (
            pytest.raises(
                AssertionError, match=r"2 calls of compiled code began a new generation .*lifetime_programs\.py"
            ),
            assert_steps_marked(),
        ):
            for _ in range(3):
                compiled(torch.ones(2, 8))


def test_a_forward_that_waits_may_hold_its_saved_tensors_at_the_end_of_the_block():
    with cudagraph_emulation() as emulation:
        compiled = torch.compile(Net(), backend=emulation.backend)
        with assert_outputs_owned():
            loss = compiled(torch.ones(2, 8)).sum()
        loss.backward()
