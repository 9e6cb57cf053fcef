"""The table of a run of conformance suites."""

import pytest

from hotloop.testing import Conformance
from hotloop.testing.pytest_report import report

pytest_plugins = ["pytester"]


class WithLimit(Conformance):
    __test__ = False
    name = "a framework"
    limits = {"test_captured_step": "its hooks run inside the step"}
    test_two_fits = None


def test_a_cell_is_what_the_run_found():
    outcomes = {name: "passed" for name, _ in Conformance.order()} | {"test_disabled": "failed"}
    del outcomes["test_removal"]
    text = report({WithLimit: outcomes})
    lines = {line.split(" | ")[0][2:]: line.rstrip(" |").split(" | ")[-1] for line in text.splitlines() if "| " in line}
    promises = dict(Conformance.order())
    assert lines["promise"] == "a framework"
    assert lines[promises["test_same_result"]] == "yes"
    assert lines[promises["test_disabled"]] == "**no**"
    assert lines[promises["test_removal"]] == "not run"
    assert lines[promises["test_two_fits"]] == "-"
    assert lines[promises["test_captured_step"]] == "see 1"
    assert "1. its hooks run inside the step" in text


def test_the_plugin_writes_it(pytester):
    pytester.makepyfile("""
        from hotloop.testing import Conformance

        class TestMine(Conformance):
            def test_same_result(self):
                pass

            def test_disabled(self):
                assert False

            test_captured_step = None

        class TestOther:
            def test_same_result(self):
                assert False
    """)
    only = ["-k", "(same_result and not accumulation) or disabled"]
    pytester.runpytest("-p", "hotloop.testing.pytest_report", "--conformance-report", "found.md", *only)
    text = (pytester.path / "found.md").read_text()
    assert text.splitlines()[0] == "| promise | Mine |"
    assert text.count("| yes |") == 1
    assert text.count("| **no** |") == 1
    assert text.count("| not run |") == len(Conformance.order()) - 3
    assert text.count("| - |") == 1


def test_of_a_test_with_parameters_the_worst_counts_and_suites_of_one_name_are_two(pytester):
    pytester.makepyfile("""
        import pytest
        from hotloop.testing import Conformance

        class TestOne(Conformance):
            name = "mine"

            @pytest.mark.parametrize("holds", [True, False, True])
            def test_same_result(self, holds):
                assert holds

        class TestTwo(Conformance):
            name = "mine"

            def test_same_result(self):
                pass
    """)
    only = ["-p", "hotloop.testing.pytest_report", "-k", "same_result and not accumulation"]
    pytester.runpytest(*only, "--conformance-report", "found.md")
    head, _, first = (pytester.path / "found.md").read_text().splitlines()[:3]
    assert head.count("| mine (") == 2
    assert first.endswith("| **no** | yes |")


@pytest.mark.campaign
def test_processes_of_which_none_knows_all_tests_are_refused(pytester):
    pytest.importorskip("xdist")
    ran = pytester.runpytest_subprocess(
        "-p", "hotloop.testing.pytest_report", "-n", "1", "--conformance-report", "found.md"
    )
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    ran.stderr.fnmatch_lines(["*add -n 0*"])
    assert not (pytester.path / "found.md").exists()


def test_promises_have_the_order_in_which_they_are_written():
    names = [name for name, _ in Conformance.order()]
    assert names[0] == "test_same_result"
    assert names[-1] == "test_exceptions_of_the_user"
    with pytest.raises(AssertionError, match="do not exist"):
        type("Wrong", (Conformance,), {"limits": {"test_nonesuch": "why"}}).promises()
