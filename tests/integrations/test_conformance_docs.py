"""The tables in the docs are what the suites say."""

from pathlib import Path

import pytest
import test_accelerate_conformance
import test_diffusers_conformance
import test_fabric_conformance
import test_lightning_conformance
import test_transformers_conformance

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "suite"),
    [
        ("accelerate.md", test_accelerate_conformance.TestLoopAroundAccelerate),
        ("accelerate.md", test_accelerate_conformance.TestPrepare),
        ("diffusers.md", test_diffusers_conformance.TestDiffusers),
        ("fabric.md", test_fabric_conformance.TestLoop),
        ("fabric.md", test_fabric_conformance.TestCompile),
        ("lightning.md", test_lightning_conformance.TestTrainer),
        ("transformers.md", test_transformers_conformance.TestHotTrainer),
        ("transformers.md", test_transformers_conformance.TestTrainer),
    ],
)
def test_the_docs_hold_the_table(page, suite):
    assert suite.table() in (DOCS / page).read_text(), f"docs/{page} should hold:\n{suite.table()}"
