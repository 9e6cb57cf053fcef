import pytest
from training_fixtures import write_pairs

from hotloop.errors import DataError
from hotloop.recipes.criteria import csv_pairs, icd10
from hotloop.recipes.criteria.pairs import Pair, Split
from hotloop.train import configure

HEADER = "text,criterion,label,group\n"


def settings_for(path, *more):
    return configure.load(["data=csv", f"data.path={path}", *more]).data


def read(tmp_path, text, *more):
    path = tmp_path / "pairs.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return csv_pairs.split(settings_for(path, *more), seed=0)


def test_groups_are_never_split_and_labels_are_on_both_sides(tmp_path):
    split = csv_pairs.split(settings_for(write_pairs(tmp_path / "a.csv")), seed=0)
    train, held_out = ({pair.group for pair in side} for side in (split.train, split.validation))
    assert not train & held_out
    assert len(split.train) + len(split.validation) == 48
    assert {pair.label for pair in split.validation} == {0, 1}


def test_column_names_and_delimiter_can_be_mapped(tmp_path):
    path = write_pairs(tmp_path / "a.csv", header=("note", "rule", "met", "patient"))
    path.write_text(path.read_text().replace(",", ";"))
    names = [
        f"data.columns.{a}={b}"
        for a, b in zip(("text", "criterion", "label", "group"), ("note", "rule", "met", "patient"), strict=True)
    ]
    assert len(csv_pairs.split(settings_for(path, *names, 'data.delimiter=";"'), seed=0).train) > 30


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("c,d,yes,g2", "line 4: label is 'yes': expected 0 or 1"),
        (",e,1,g3", "line 4: text is empty"),
        ("a,b,1,g4", "line 4: repeats line 2"),
        ("a,b,0,g4", "line 4: contradicts line 2, which says 1"),
        ("x,y", "line 4: 2 values, where the header names 4"),
        ('"two\nlines",f,1,\n,,,', r"line 4: group is empty \(2 such rows\)"),
    ],
)
def test_a_row_that_does_not_fit_is_named_by_its_line(tmp_path, row, reason):
    with pytest.raises(DataError, match=rf"{reason}.*data\.on_bad_rows=skip"):
        read(tmp_path, f"{HEADER}a,b,1,g1\n\n{row}\n")


def test_bad_rows_can_be_left_out(tmp_path):
    path = write_pairs(tmp_path / "a.csv")
    with path.open("a") as file:
        file.write("a,b,x,g\n")
    split = csv_pairs.split(settings_for(path, "data.on_bad_rows=skip"), seed=0)
    assert split.notes[0].startswith("left out 1 rows, the first: ")
    assert "line 50: label is 'x'" in split.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no single column"),
        (HEADER, "holds no rows"),
        ("a,b,1,g\n", "no single column for data.columns.text=text"),
        (
            "text,text,criterion,label,group\n",
            "no single column for data.columns.text=text; its header reads text, text",
        ),
        (HEADER + "a,b,1,g\nc,d,0,g\n", "all 2 pairs are of one group|too few to hold out"),
        (HEADER + "".join(f"a{i},b,1,g{i}\n" for i in range(9)), "only pairs with label 1"),
        (HEADER + "a,b,1,g1\nc,d,0,g2\n", "too few to hold out|side of the split has"),
        (HEADER.encode() + b"a,b,1,g\nc\xff,d,0,h\n", "not readable as CSV in UTF-8.*0xff"),
        (HEADER + 'a,b,1,g\n"c"x,d,0,h\n', "line 3 or behind it: not readable as CSV"),
        (HEADER + "a" * 200_000 + ",b,1,g\n", "line 2 or behind it: not readable as CSV"),
    ],
)
def test_files_that_cannot_be_used_are_refused_with_the_reason(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, text)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(DataError, match=r"pair\.csv cannot be read: No such file"):
        csv_pairs.split(settings_for(tmp_path / "pair.csv"), seed=0)


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    path = write_pairs(tmp_path / "a.csv")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert csv_pairs.split(settings_for(path), seed=0).train


def test_icd10_negatives_come_from_another_category_of_the_chapter_on_the_same_side():
    home = {}
    for term in icd10.terms():
        home.setdefault(term.description, set()).add((term.chapter, term.category))
    split = icd10.split(size=2000, fraction=0.2, seed=0)
    chapter = {term.category: term.chapter for term in icd10.terms()}
    sides = [{pair.group for pair in side} for side in (split.train, split.validation)]
    assert not sides[0] & sides[1]
    for groups, side in zip(sides, (split.train, split.validation), strict=True):
        assert sum(pair.label for pair in side) * 2 == len(side)
        for pair in side:
            homes = home[pair.criterion]
            assert any((chapter[pair.group] == ch) and ((pair.group == cat) == bool(pair.label)) for ch, cat in homes)
            assert any(cat in groups or pair.label == 0 for _, cat in homes)
    criteria = [{pair.criterion for pair in side} for side in (split.train, split.validation)]
    assert not criteria[0] & criteria[1], "a criterion seen in training must not be met in validation"


def test_icd10_is_as_large_as_stated():
    terms = icd10.terms()
    assert (len(terms), len({term.category for term in terms})) == (12_552, 1_447)


def test_sibling_negatives_stay_in_the_category():
    split = icd10.split(size=1000, fraction=0.2, seed=0, negatives="sibling")
    descriptions = {}
    for term in icd10.terms():
        descriptions.setdefault(term.category, set()).add(term.description)
    assert all(pair.criterion in descriptions[pair.group] for pair in split.train)


def test_a_sample_too_small_to_split_is_refused():
    with pytest.raises(DataError, match=r"too few to hold out|both labels are needed"):
        icd10.split(size=6, fraction=0.2, seed=0)


def test_the_same_seed_gives_the_same_split_and_another_gives_another():
    first, again, other = (icd10.split(size=400, fraction=0.2, seed=seed) for seed in (0, 0, 1))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def test_a_side_with_one_label_is_refused():
    pairs = tuple(Pair("a", "b", label, "g") for label in (0, 1))
    with pytest.raises(DataError, match="validation side of the split has no pairs"):
        Split(pairs, ()).checked()


def test_overlap_is_of_distinct_words_without_case_and_signs():
    assert Pair("Acute cough, acute", "cough (dry)", 1, "g").overlap() == pytest.approx(1 / 3)
    assert Pair("...", "-", 1, "g").overlap() == 0
