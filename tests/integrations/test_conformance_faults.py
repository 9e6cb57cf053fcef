"""The conformance suite finds an integration that freezes the Python state of a step."""

import dataclasses

import pytest
import test_conformance_plain as plain

from hotloop import events as ev
from hotloop.compiling.observe import collector


class Told:
    """An empty status."""

    def to_dict(self):
        return {}


class Faulty(plain.Plain):
    """A faulty capture: after six calls it runs without the step's own Python."""

    test_captured_step = None
    fault = None

    def fit(self, task):
        return plain.fit_plainly(task, self.hot)

    def hot(self, task, optimizer, step):
        if task.run is None:
            return step, dict
        calls = 0

        def run(*args, **kwargs):
            nonlocal calls
            calls += 1
            collector.emit(ev.Compiled(component=None, frame="0/0", function="step", file=None, line=None))
            return type(self).fault(task.python, step, args, kwargs) if calls > 6 else step(*args, **kwargs)

        return run, lambda: {"status": Told()}


def frozen(python, step, args, kwargs):
    kept, python.weight = python.weight, 1.0
    result = step(*args, **kwargs)
    python.weight = kept
    return result


def replayed(python, step, args, kwargs):
    kept = python.steps
    result = step(*args, **kwargs)
    python.steps = kept
    return result


def proven_with_its_python(python, step, args, kwargs):
    python.steps += python.counting
    return step(*args, **kwargs)


def right(python, step, args, kwargs):
    return step(*args, **kwargs)


def suite(fault):
    return type("Subject", (Faulty,), {"fault": staticmethod(fault)})()


@pytest.mark.parametrize(
    ("fault", "test", "told"),
    [
        (frozen, "test_python_that_a_step_reads", "losses is not as in eager"),
        (replayed, "test_python_that_a_step_counts", "counts 6 steps in 12 batches"),
        (proven_with_its_python, "test_python_that_a_step_counts", "counts 18 steps in 12 batches"),
    ],
)
def test_a_fault_is_found(fault, test, told):
    with pytest.raises(AssertionError, match=told):
        getattr(suite(fault), test)()


@pytest.mark.parametrize("test", ["test_python_that_a_step_reads", "test_python_that_a_step_counts"])
def test_an_integration_without_one_passes(test):
    getattr(suite(right), test)()


def test_a_fit_that_never_calls_begin_has_tested_nothing():
    class Deaf(Faulty):
        def fit(self, task):
            return super().fit(dataclasses.replace(task, begin=lambda: None))

    subject = type("Subject", (Deaf,), {"fault": staticmethod(right)})()
    with pytest.raises(AssertionError, match=r"begin was called 0 times in 12 batches"):
        subject.test_python_that_a_step_reads()
