"""The parameters of a program's function are its settings: read, checked, listed, kept and resumed."""

import json
import textwrap

import pytest
import torch
from typer.testing import CliRunner

from hotloop import record
from hotloop.cli import app
from hotloop.errors import ConfigError
from hotloop.step.workload import load_factory
from hotloop.train import checkpoint, configure, program, signature, start

PROGRAM = """
    from __future__ import annotations

    import dataclasses
    import enum
    from pathlib import Path
    from typing import Annotated, Literal

    import pydantic
    import torch

    import hotloop


    class Size(enum.Enum):
        SMALL = "small"
        BIG = "big"


    @dataclasses.dataclass(frozen=True)
    class Optimizer:
        lr: Annotated[float, hotloop.Range(0, 1)] = 1e-2
        betas: tuple[float, float] = (0.9, 0.99)


    class Checked(pydantic.BaseModel):
        '''What it takes.

        Attributes:
            width: units.
        '''
        width: int = pydantic.Field(8, gt=0, lt=100)
        depth: int = 2

        @pydantic.field_validator("depth")
        @classmethod
        def even(cls, value):
            if value % 2:
                raise ValueError("depth has to be even")
            return value


    class Odd:
        pass


    def workload(seen):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        made = hotloop.Workload(model, optimizer, step, [torch.ones(3, 2)] * 2, metrics=lambda: {"loss": 1.0})
        object.__setattr__(made, "seen", seen)
        return made


    def typed(
        lr: Annotated[float, hotloop.Range(0, 1)] = 1e-3,
        width: int = 256,
        name: Literal["wide", "deep"] = "wide",
        size: Size = Size.SMALL,
        where: Path = Path("here"),
        clip: float | None = None,
        sizes: list[int] = [1, 2],
        more: dict[str, int] = {"a": 1},
        copy: bool = False,
        *,
        _cache=None,
    ):
        '''Make a model.

        Args:
            lr: the learning rate,
                of the head.
            width: units of
                a layer.
        '''
        return workload(dict(locals()))


    def untyped(lr=1e-3, steps=3, on=True, name="x"):
        return workload(dict(locals()))


    def sloppy(clip: float = None):
        return workload(dict(locals()))


    def needed(lr: float, width: int = 8):
        return workload(dict(locals()))


    def nested(optimizer: Optimizer = Optimizer(lr=0.5), width: int = 8):
        return workload(dict(locals()))


    def as_dataclass(options: Optimizer):
        return workload(dict(locals()))


    def as_model(options: Checked = Checked(width=16)):
        return workload(dict(locals()))


    def no_parameters():
        return workload({})


    def unknown(lr):
        return workload({})


    def odd(thing: Odd = None):
        return workload({})


    def forgot_annotated(lr: hotloop.Search(log=(1, 2)) = 1.0):
        return workload({})


    def missing_name(thing: Nowhere = None):
        return workload({})


    def wrong_default(width: int = 1.5):
        return workload({})


    def raises(lr: float = 1.0):
        raise RuntimeError("planted")


    def no_workload(lr: float = 1.0):
        return 5
"""


@pytest.fixture
def named(tmp_path):
    """The name of a function of the program."""
    (tmp_path / "own.py").write_text(textwrap.dedent(PROGRAM))
    return lambda function: f"{tmp_path / 'own.py'}:{function}"


def seen(name, **values):
    return program.load(name).make(values).seen


def test_parameters_are_read_with_type_default_range_and_docstring(named):
    found = {one.name: one for one in program.load(named("typed")).parameters}
    assert found["lr"].line().startswith("program.lr=0.001 (float, ")
    assert found["lr"].line().endswith("; default 0.001): the learning rate, of the head.")
    assert found["width"].line(64) == "program.width=64 (int; default 256): units of a layer."
    assert found["name"].takes == "Literal['wide', 'deep']"
    assert list(found) == ["lr", "width", "name", "size", "where", "clip", "sizes", "more", "copy"]


def test_the_function_gets_values_of_its_types(named):
    given = {"lr": 1, "size": "big", "where": "there", "clip": 0.5, "sizes": [3], "more": {"b": 2}, "copy": True}
    got = seen(named("typed"), **given)
    assert (got["lr"], type(got["lr"]), got["size"].name, got["where"].name) == (1.0, float, "BIG", "there")
    assert (got["clip"], got["sizes"], got["more"], got["copy"], got["_cache"]) == (0.5, [3], {"b": 2}, True, None)
    assert seen(named("untyped"), lr=1) == {"lr": 1.0, "steps": 3, "on": True, "name": "x"}
    assert seen(named("sloppy")) == {"clip": None}
    assert seen(named("needed"), lr=0.5) == {"lr": 0.5, "width": 8}


def test_a_dataclass_or_a_pydantic_model_is_the_settings_itself(named):
    options = seen(named("as_dataclass"), betas=[0.5, 0.6])["options"]
    assert (type(options).__name__, options.lr, options.betas) == ("Optimizer", 0.01, (0.5, 0.6))
    assert program.load(named("as_model")).filled({}) == {"width": 16, "depth": 2}
    assert seen(named("as_model"), width=3)["options"].width == 3


def test_a_nested_setting_is_changed_on_its_own(named):
    assert program.load(named("nested")).filled({"optimizer": {"betas": [0.1, 0.2]}}) == {
        "optimizer": {"lr": 0.5, "betas": [0.1, 0.2]},
        "width": 8,
    }
    assert seen(named("nested"), optimizer={"lr": 0.25})["optimizer"].lr == 0.25


@pytest.mark.parametrize(
    ("function", "values", "said"),
    [
        ("typed", {"lrr": 1}, "unknown setting program.lrr: did you mean program.lr?"),
        ("typed", {"lr": 2, "width": 2.5}, "program.lr=2: Input should be less than or equal to 1\nprogram.width=2.5: "),
        ("typed", {"width": "8"}, "program.width='8': Input should be a valid integer"),
        ("typed", {"clip": float("nan"), "name": "flat"}, "program.name='flat': Input should be 'wide' or 'deep'"),
        ("typed", {"sizes": [1, "x"]}, "program.sizes='x': Input should be a valid integer"),
        ("nested", {"optimizer": {"lr": 5}}, "program.optimizer.lr=5: Input should be less than or equal to 1"),
        ("nested", {"optimizer": 5}, "unknown setting program.optimizer: did you mean program.optimizer.lr"),
        ("as_model", {"depth": 3}, "program.depth: Value error, depth has to be even"),
        ("needed", {}, "program.lr: Field required"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_what_was_expected(named, function, values, said):
    with pytest.raises(ConfigError) as caught:
        program.load(named(function)).filled(values)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("unknown", "lr has neither a type nor a default that tells it: write lr: float"),
        ("odd", "own.Odd'>. A setting is a number, text, true or false, a Literal, an Enum"),
        ("missing_name", "name 'Nowhere' is not defined; import it outside of `if TYPE_CHECKING:`"),
    ],
)
def test_what_cannot_be_a_setting_is_told(named, function, said):
    with pytest.raises(ConfigError) as caught:
        program.load(named(function))
    assert said in str(caught.value)


def test_what_a_program_raises_or_returns_is_its_own(named):
    with pytest.raises(RuntimeError, match="planted"):
        seen(named("raises"))
    with pytest.raises(ConfigError, match=r"no_workload\(\) gave a int, expected a hotloop.Workload"):
        seen(named("no_workload"))


def run(*arguments):
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_settings_come_from_the_command_line_and_are_recorded_and_resumed(named, tmp_path):
    folder = tmp_path / "run"
    said = run("train", named("typed"), "program.lr=3e-4", "program.size=big", f"run.folder={folder}")
    assert "Settings: program.lr=0.0003 program.width=256" in said
    kept = configure.load(config=folder / "settings.yaml").program
    assert (kept["lr"], kept["size"], kept["width"]) == (3e-4, "big", 256)
    assert checkpoint.load(folder / "checkpoints" / "last.pt")["settings"]["program"] == kept
    document = record.load(folder)
    assert document["settings"]["program"]["lr"] == 3e-4
    assert "program.width=256 (int; default 256): units of a layer." in document["told"]["program"]
    again = start.prepare([named("typed"), f"run.resume={folder}"]).settings
    assert again.program == kept
    with pytest.raises(ConfigError, match=r"program\.lr=0\.0003 to 0\.5"):
        start.prepare([f"run.resume={folder}", "program.lr=0.5"])


def test_other_commands_and_processes_make_the_program_of_a_run(named, tmp_path):
    run("train", named("typed"), "program.width=64", f"run.folder={tmp_path / 'run'}")
    assert load_factory(f"{tmp_path / 'run' / 'program.py'}:make")().seen["width"] == 64
    judged = run("eval", f"run={tmp_path / 'run'}", "--json")
    assert json.loads(judged)["metrics"] == {"loss": 1.0}


def test_help_lists_the_settings_of_the_program(named):
    for command in ("train", "kfold", "hpo"):
        said = run(command, named("typed"), "--help")
        assert "Make a model." in said
        assert "program.width=256 (int; default 256): units of a layer." in said
    assert "Settings of" not in run("train", "--help")
    assert "It has none" in run("train", f"recipe={named('no_parameters')}", "--help")


GOOGLE = """Train.

Some more: words.

Args:
    lr (float, optional): the rate
        of AdamW: its step.
    width (Annotated[int, Range(1, 8)]): units.

    betas: two.
    depth: as
      width.

Returns:
    model: trained.
"""


def test_a_docstring_says_what_settings_are_for():
    found = signature.documented(GOOGLE)
    assert found == {"lr": "the rate of AdamW: its step.", "width": "units.", "betas": "two.", "depth": "as width."}


def test_all_that_is_wrong_is_said_at_once(named):
    with pytest.raises(ConfigError) as caught:
        start.prepare([
            named("typed"), "program.lr=2", "program.nmae=deep", "program.width=x",
        ])  # fmt: skip
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "unknown setting program.nmae",
        "program.lr=2",
        "program.width='x'",
    ]
    with pytest.raises(ConfigError) as caught:
        program.load(named("needed")).filled({"rl": 1})
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "unknown setting program.rl",
        "program.lr",
    ]


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("nan", "nan"), ("1e3", "1e3"), ("True", "True"), ("007", "007"), ("null", "null"), ("[a,b]", "[a,b]"),
        ("a,b", "a,b"), ("a: b", "a: b"), ("['it\\']", "['it\\']"), ("'nan'", "nan"), ("plain", "plain"), ("", ""),
        (r"['\\", r"['\\"),
    ],
)  # fmt: skip
def test_a_text_setting_is_the_text_as_written(named, written, kept):
    name = named("untyped")
    settings = program.filled(configure.load([name, f"program.name={written}", "program.lr=1e-2"]))
    assert settings.program == {"lr": 0.01, "steps": 3, "on": True, "name": kept}
    again = program.filled(configure.from_dict(configure.to_dict(settings), [f"program.name={written}"]))
    assert again.program == settings.program


def test_weights_are_made_by_the_seed_whatever_reading_the_file_draws(tmp_path):
    text = textwrap.dedent(PROGRAM) + "\ntorch.manual_seed(7)\ntorch.rand(3)\n"
    (tmp_path / "own.py").write_text(text)
    found = []
    for folder in ("first", "second"):
        run("train", f"{tmp_path / 'own.py'}:typed", f"run.folder={tmp_path / folder}")
        found.append(checkpoint.load(tmp_path / folder / "checkpoints" / "last.pt")["model"]["model"]["weight"])
    assert torch.equal(*found)
