"""The catalogue and the rules say the same."""

from __future__ import annotations

from diagnose_catalogue import PAGE, render

from hotloop.diagnose import CATALOGUE


def test_the_page_is_what_the_rules_say():
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "docs/reference/catalogue.md is out of date: python tests/diagnose/diagnose_catalogue.py writes it anew"
    )


def test_every_entry_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert all(problem.symptom in page and problem.change in page for problem in CATALOGUE)
