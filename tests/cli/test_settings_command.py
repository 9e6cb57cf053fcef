"""``hotloop settings``: the table of all settings, and the JSON Schema that editors read."""

import json

import pytest

from hotloop.cli import main

PROGRAM = '''
import dataclasses
from typing import Annotated
import hotloop

@dataclasses.dataclass
class Net:
    """A net.

    Attributes:
        width: of each layer.
    """
    width: int = 8

def make(rate: Annotated[float, hotloop.Range(0, 1)] = 0.1, net: Net = Net()):
    """Train it."""
'''


@pytest.fixture
def printed(capsys):
    def printed(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["settings", *map(str, arguments)])
        out, error = capsys.readouterr()
        return caught.value.code, out, error

    return printed


def nodes(schema, prefix=""):
    """Yield every setting of a schema with what stands there, references followed."""

    def follow(node, defs, path):
        if "$ref" in node:
            node = {**defs[node["$ref"].rpartition("/")[2]], **node}
        yield path, node
        for name, given in node.get("properties", {}).items():
            inner = given["anyOf"][0] if "enum" in given.get("anyOf", [{}])[-1] else given
            yield from follow(inner, defs, f"{path}.{name}".strip("."))

    return dict(follow(schema, schema.get("$defs", {}), prefix))


def test_the_table_lists_what_a_recipe_has_with_its_values(printed):
    code, out, _ = printed("recipe=focus", "training.num_epochs=7")
    assert code == 0
    assert "training.num_epochs=7" in out
    assert "focus.blocks=25" in out
    assert "Passes over the training data" in out
    assert "pictures" not in out.replace("pictures of", "")


@pytest.mark.parametrize("recipe", ["criteria", "focus"])
def test_the_schema_says_of_each_setting_its_default_range_and_reason(printed, recipe):
    code, out, _ = printed("--schema", f"recipe={recipe}")
    found = nodes(json.loads(out))
    assert code == 0
    assert all(node.get("description") for path, node in found.items()), "each has its comment of conf/"
    assert not any(node.get("required") for node in found.values()), "a file may say any part"
    assert all(node["additionalProperties"] is False for node in found.values() if "properties" in node)
    assert found["training.num_epochs"]["minimum"] == 1
    assert found["run.seed"]["default"] == 0
    assert ("data.path" in found, "focus" in found) == (recipe == "criteria", recipe == "focus")


def test_the_schema_of_a_program_has_its_own_settings(printed, tmp_path):
    (tmp_path / "own.py").write_text(PROGRAM)
    code, out, _ = printed("--schema", f"{tmp_path / 'own.py'}:make")
    found = nodes(json.loads(out))
    assert code == 0
    assert found["program.rate"] | {"title": ""} == {
        "default": 0.1,
        "maximum": 1,
        "minimum": 0,
        "title": "",
        "type": "number",
    }
    assert found["program.net.width"]["default"] == 8
    assert found["program"]["additionalProperties"] is False
    assert "training.batch_size" not in found
    assert "program.rate=0.1" in printed(f"{tmp_path / 'own.py'}:make")[1]


def test_a_wrong_setting_is_wrong_usage(printed):
    code, _, error = printed("recipe=focus", "data.path=x")
    assert code == 2
    assert "recipe=focus has no data.path" in error
