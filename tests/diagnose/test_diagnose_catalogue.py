"""The catalogue says what the rules say."""

from __future__ import annotations

from diagnose_catalogue import render

from hotloop.diagnose import CATALOGUE


def test_every_entry_is_on_the_page():
    page = render()
    assert all(problem.symptom in page and problem.change in page for problem in CATALOGUE)
