"""The reference names every public name, and the page of the command line is what the commands say."""

import re
from pathlib import Path

import hotloop
import hotloop.testing
from hotloop.cli import documentation

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"


def documented():
    """Return every name that a page of the reference takes from docstrings."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    return set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))


def test_every_public_name_is_in_the_reference():
    modules = {"observe", "presets", "testing"}  # `watch`, `Preset` and the names of `testing` stand for them
    names = {f"hotloop.{name}" for name in hotloop.__all__ if name not in modules}
    names |= {f"hotloop.testing.{name}" for name in hotloop.testing.__all__}
    assert names - documented() == set()


def test_the_page_of_the_command_line_names_every_option_that_a_command_takes():
    page = documentation.render()
    for text in ("## hotloop train", "### hotloop hpo best", "`--dry-run`", "`--format "):
        assert text in page
