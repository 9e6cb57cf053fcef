"""Whose exception it is: one of hotloop's is never taken for one that came out of the step."""

import dataclasses

import pytest

from hotloop.step.state.program import Ran


@dataclasses.dataclass(frozen=True)
class Fixed(Exception):
    """An exception that takes no attributes."""

    why: str


def test_an_exception_of_ours_is_not_the_users_though_it_lies_where_theirs_lay():
    ran = Ran()
    ran.begin()

    @ran.follow
    def step():
        raise ValueError("the user's, in a run that is undone")

    for _ in range(20):
        with pytest.raises(ValueError, match="undone") as caught:
            step()
        assert ran.is_users(caught.value)
        del caught  # the next exception gets its address
        assert not ran.is_users(RuntimeError("ours"))


def test_an_exception_that_takes_no_attributes_is_known_as_well():
    ran, error = Ran(), Fixed("mine")
    ran.raised(error)
    assert ran.is_users(error)
    assert not ran.is_users(Fixed("mine"))
