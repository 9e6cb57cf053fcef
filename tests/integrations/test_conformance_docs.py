"""The tables in the docs equal those of the suites."""

from pathlib import Path

import test_accelerate_conformance
import test_conformance_plain
import test_diffusers_conformance
import test_fabric_conformance
import test_lightning_conformance
import test_transformers_conformance

from hotloop.testing import Conformance
from hotloop.testing.pytest_report import report

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_all_is_of_the_suites_that_there_are():
    """A run writes this table (``--conformance-report``): run it again after changing a promise, suite or limit."""
    suites = (
        test_conformance_plain.TestLoop,
        test_conformance_plain.TestCompile,
        test_lightning_conformance.TestTrainer,
        test_lightning_conformance.TestInPlace,
        test_fabric_conformance.TestLoop,
        test_fabric_conformance.TestCompile,
        test_transformers_conformance.TestTrainer,
        test_transformers_conformance.TestHotTrainer,
        test_accelerate_conformance.TestPrepare,
        test_accelerate_conformance.TestLoopAroundAccelerate,
        test_diffusers_conformance.TestDiffusers,
    )
    passed = {name: "passed" for name, _ in Conformance.order()}
    table = report(dict.fromkeys(suites, passed)).rpartition("Run on")[0].strip()
    assert table in (DOCS / "reference" / "conformance.md").read_text()
