"""The texts of recipe `focus`: Python's own, split by document, and cut so that what was read comes back."""

import sysconfig
from pathlib import Path

import pytest
import torch

from hotloop.errors import DataError
from hotloop.recipes.focus import texts
from hotloop.train import configure


@pytest.fixture(scope="module")
def settings():
    return configure.load(["recipe=focus", "focus.files=6"])


@pytest.mark.campaign
def test_documents_are_the_same_for_a_seed_and_none_is_on_both_sides(settings):
    sides = texts.load(settings)
    names = [{one.name for one in side} for side in sides]
    assert not names[0] & names[1]
    assert sum(name.endswith(".py") for side in names for name in side) == 6
    assert any(name == "help('for')" for side in names for name in side)
    assert not any("test" in name.split("/") for side in names for name in side)
    assert texts.load(settings).fingerprint() == sides.fingerprint()
    other = configure.load(["recipe=focus", "focus.files=6", "run.seed=1"])
    assert texts.load(other).fingerprint() != sides.fingerprint()


def test_what_was_generated_as_python_was_built_is_no_document():
    found = {name for name, _ in texts._sources(Path(sysconfig.get_paths()["stdlib"]))}
    assert "argparse.py" in found
    assert not any("sysconfigdata" in name for name in found), "it holds paths of one machine"


def test_texts_begin_several_documents_and_go_on_with_one():
    side = tuple(texts.Document(str(number), "x" * (30 + number)) for number in range(5))
    encode = lambda text: torch.arange(len(text)) + 1000 * len(text)  # noqa: E731 - each token tells where it is from
    pieces = texts.cut(side, encode, 12, 4)
    made = texts.by_turns(pieces, 3, 4, torch.Generator().manual_seed(0))
    assert made.shape == (len(pieces.tokens), 3 * 8 + 4)
    at = set()
    for row in made:
        begun, ahead = row[:24].view(3, 8), row[24:]
        origin = (begun[:, 0] // 1000).tolist()
        assert len(set(origin)) == 3
        assert all(torch.equal(one.diff(), torch.ones(7, dtype=torch.long)) for one in begun)
        (back,) = [number for number, one in enumerate(begun) if int(one[-1]) + 1 == int(ahead[0])]
        assert origin[back] == int(ahead[0]) // 1000
        at.add(back)
    assert at == {0, 1, 2}
    assert torch.equal(made, texts.by_turns(pieces, 3, 4, torch.Generator().manual_seed(0)))


def test_one_document_is_read_on_and_on():
    pieces = texts.cut((texts.Document("a", "x" * 40),), lambda text: torch.arange(len(text)), 12, 4)
    assert torch.equal(texts.by_turns(pieces, 1, 4, torch.Generator()), pieces.tokens)


@pytest.mark.parametrize(
    ("length", "documents", "message"),
    [(100, 1, r"no document has 100 tokens, which focus\.blocks asks for"), (12, 3, r"focus\.documents=3: only 2 doc")],
)
def test_too_little_text_is_told(length, documents, message):
    side = tuple(texts.Document(name, "x" * 40) for name in "ab")
    with pytest.raises(DataError, match=message):
        texts.by_turns(
            texts.cut(side, lambda text: torch.arange(len(text)), length, 4), documents, 4, torch.Generator()
        )
