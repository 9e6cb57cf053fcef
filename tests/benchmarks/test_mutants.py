"""`benchmarks.mutants` plants faults in copies of a tree, and says which of them its tests find."""

from benchmarks.mutants import choose, find_tests, measure, mutants_of

SOURCE = """
def larger(a, b):
    "é: columns are bytes."
    if a > b:
        return a
    return b


def unused(a):
    a.append(min(a, 1))
"""
TEST = """
from toy.room import larger


def test_larger():
    assert larger(1, 2) == larger(2, 1) == 2
"""


def toy(folder):
    for name, text in {
        "src/toy/__init__.py": "", "src/toy/room.py": SOURCE, "tests/room/test_room.py": TEST,
        "tests/test_other.py": "", "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['campaign: slow']\n",
    }.items():  # fmt: skip
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_a_fault_of_each_kind_is_planted_where_it_is_named():
    found = mutants_of("room.py", SOURCE.encode())
    assert [(one.kind, one.line, one.before, one.after) for one in found] == [
        ("negated", 4, "a > b", "(not (a > b))"),
        ("dropped", 10, "a.append(min(a, 1))", "pass"),
        ("swapped", 10, "a, 1", "1, a"),
    ]
    assert b"if (not (a > b)):" in found[0].planted(SOURCE.encode())


def test_what_tests_see_is_found_what_they_do_not_see_is_not_and_the_tree_stays(tmp_path):
    root = toy(tmp_path)
    chosen = [one for one in choose(root, 0, 9, ["room"]) if one.kind != "swapped"]
    told = measure(root, chosen, 1, 60, lambda line: None)
    assert (told["tried"], told["found"], told["share"]) == (2, 1, 0.5)
    assert {one["kind"]: one["result"] for one in told["mutants"]} == {"negated": "failed", "dropped": "passed"}
    assert (root / "src/toy/room.py").read_text(encoding="utf-8") == SOURCE


def test_a_seed_gives_the_same_faults_and_a_file_has_the_tests_of_its_name(tmp_path):
    root = toy(tmp_path)
    assert choose(root, 3, 2, []) == choose(root, 3, 2, []) != choose(root, 4, 2, [])
    assert find_tests(root, "src/toy/room.py") == ["tests/room"]
    assert find_tests(root, "src/toy/other.py") == ["tests/test_other.py"]
