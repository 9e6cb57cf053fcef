"""Where code may catch an error that is raised in what it calls."""

import _thread
import contextlib
import inspect
import linecache
import time

import pytest
import torch

from hotloop.step.audit.caught import check_running


def check():
    return check_running({check.__code__}, audit.__code__)


def audit(step):
    return step()


def plain():
    return audit(check)


def excepts():
    try:
        return audit(check)
    except ValueError:
        return None


def excepts_all():
    try:
        return audit(check)
    except:  # noqa: E722 - what is tried
        return None


def excepts_later():
    try:
        return audit(check)
    except KeyboardInterrupt:
        return None
    except RuntimeError:
        return None


def excepts_several():
    try:
        return audit(check)
    except (ValueError, KeyboardInterrupt):
        return None


def within_excepts():
    with torch.no_grad():
        return excepts()


def excepts_around_a_context():
    try:
        with torch.no_grad():
            return audit(check)
    except ValueError:
        return None


def excepts_around_finally():
    try:
        try:
            return audit(check)
        finally:
            int("1")
    except ValueError:
        return None


def excepts_around_another():
    try:
        try:
            return audit(check)
        except KeyboardInterrupt:
            return None
    except ValueError:
        return None


def excepts_around_a_list():
    try:
        (found,) = [audit(check) for _ in range(1)]
    except ValueError:
        return None
    return found


def suppresses():
    with contextlib.suppress(ValueError):
        return audit(check)


def in_the_step():
    def step():
        try:
            return check()
        except ValueError:
            return None

    return audit(step)


def after_try():
    try:
        int("1")
    except ValueError:
        return None
    return audit(check)


def in_the_handler():
    try:
        int("x")
    except ValueError:
        return audit(check)


def finally_only():
    try:
        return audit(check)
    finally:
        int("1")


def stopped_by_hand():
    try:
        return audit(check)
    except KeyboardInterrupt:
        return None


def in_contexts():
    with torch.no_grad(), contextlib.nullcontext() as _:
        return audit(lambda: next(check() for _ in range(1)))


@pytest.mark.parametrize(
    "program",
    [
        excepts,
        excepts_all,
        excepts_later,
        excepts_several,
        excepts_around_a_context,
        excepts_around_finally,
        excepts_around_another,
        excepts_around_a_list,
        within_excepts,
        suppresses,
        in_the_step,
    ],
)
def test_code_that_may_catch_the_error_is_found(program):
    found, where = program()
    file, line = where.rsplit(":", 1)
    assert found
    assert file == __file__
    assert "check" in linecache.getline(file, int(line))


def in_a_module_with_a_hook():
    class Checks(torch.nn.Module):
        def forward(self):
            return check()

    module = Checks()
    module.register_forward_hook(lambda *_: None)
    return audit(module)


@pytest.mark.parametrize(
    "program",
    [plain, after_try, in_the_handler, finally_only, stopped_by_hand, in_contexts, in_a_module_with_a_hook],
)
def test_code_that_lets_the_error_pass_is_not(program):
    assert program() == (True, "")


def test_another_function_is_no_check():
    assert check_running({inspect.signature.__code__}, audit.__code__) == (False, "")


def test_a_check_that_no_audit_leads_to_may_be_caught():
    found = []
    _thread.start_new_thread(lambda: found.append(check()), ())  # like autograd's: no code of Python's is around it
    while not found:
        time.sleep(0.01)
    assert found == [(True, "around the thread of torch's that it runs in")]
