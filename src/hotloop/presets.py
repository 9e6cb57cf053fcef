"""The presets: what each sets, what it is for, and which to try next. People and code read the same table."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from hotloop.errors import ConfigError

Backend = Literal["inductor", "aot_eager", "eager"]
Need = Literal["inductor", "gpu", "triton"]

MODES: Mapping[str, str] = MappingProxyType(
    {
        "default": "torch's own balance of compile time and speed",
        "reduce-overhead": "CUDA graphs inside torch.compile (triton.cudagraphs)",
        "max-autotune": "autotuned matrix products and convolutions, CUDA graphs, coordinate descent",
        "max-autotune-no-cudagraphs": "autotuned matrix products and convolutions, coordinate descent, no CUDA graphs",
    }
)
"""torch.compile's modes, in one line each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A named set of compile settings. Presets are values: equal settings share compiled code.

    Args:
        name: what status and messages call it.
        backend: ``inductor`` (kernels), ``aot_eager`` (ahead-of-time tracing, eager kernels) or ``eager`` (no compile).
        mode: one of torch.compile's modes (`MODES`), or None. Not together with ``options``, as in torch.
        options: Inductor options by name, e.g. ``{"shape_padding": True, "triton.cudagraphs": True}``.
        dynamic: None is torch's automatic setting (static until a second size comes); True forces dynamic shapes,
            which run slower; False compiles once per size.
        ladder: the presets to step down to when this one fails, by name or as presets, ending in ``none``.
        needs: what the machine must have.
        sets: what it sets, in words, for the table of `hotloop presets`.
        performance: how fast steps are, in a word, for the same table.
        overhead: how long it compiles, in a word.
        memory: how much it takes, in a word.
        best_for: which programs it is for, in words.
    """

    name: str
    backend: Backend = "inductor"
    mode: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dynamic: bool | None = None
    ladder: tuple[str | Preset, ...] = ("aot_eager", "none")
    needs: tuple[Need, ...] = ()
    sets: str = ""
    performance: str = ""
    overhead: str = ""
    memory: str = ""
    best_for: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        if self.backend not in ("inductor", "aot_eager", "eager"):
            raise ConfigError(f"preset {self.name!r}: backend {self.backend!r}: expected inductor, aot_eager or eager")
        if self.mode is not None and self.mode not in MODES:
            raise ConfigError(f"preset {self.name!r}: mode {self.mode!r}: {expected(self.mode, MODES)}")
        if self.mode not in (None, "default") and self.options:
            raise ConfigError(
                f"preset {self.name!r} sets both mode {self.mode!r} and options {dict(self.options)}: torch takes one; "
                "leave mode out and put what it sets into options (hotloop presets --options lists them)"
            )
        if self.dynamic not in (None, True, False):
            raise ConfigError(
                f"preset {self.name!r}: dynamic {self.dynamic!r}: expected true, false or null (automatic)"
            )

    @property
    def key(self) -> tuple[Any, ...]:
        """The settings that decide whether two presets compile alike: everything but names and words."""
        return (self.backend, self.mode, tuple(sorted((k, repr(v)) for k, v in self.options.items())), self.dynamic)

    @property
    def cudagraphs(self) -> bool:
        """Whether torch records CUDA graphs under this preset; a later call overwrites their outputs."""
        return self._sets_any(("reduce-overhead", "max-autotune"), ("triton.cudagraphs",))

    @property
    def autotunes(self) -> bool:
        """Whether matrix products may use Triton's own kernels if they are the fastest, instead of the libraries'."""
        modes = ("max-autotune", "max-autotune-no-cudagraphs")
        return self._sets_any(modes, ("max_autotune", "max_autotune_gemm"))

    def _sets_any(self, modes: tuple[str, ...], options: tuple[str, ...]) -> bool:
        named = {name.replace("-", "_"): value for name, value in self.options.items()}
        return self.backend == "inductor" and (self.mode in modes or any(named.get(option) for option in options))

    def __hash__(self) -> int:
        return hash((self.name, self.key, self.ladder))

    def __reduce__(self) -> tuple[Any, ...]:
        # The read-only mapping of options does not pickle itself.
        return functools.partial(Preset, **{**self.to_dict(), "ladder": self.ladder, "needs": self.needs}), ()

    def with_(self, *, dynamic: Any = ..., options: Mapping[str, Any] | None = None) -> Preset:
        """Return the preset with some settings replaced; ``options`` are added, and ``dynamic`` stays if unset."""
        merged = {**self.options, **(options or {})}
        return dataclasses.replace(self, dynamic=self.dynamic if dynamic is ... else dynamic, options=merged)

    def to_dict(self) -> dict[str, Any]:
        """Return the preset as plain JSON data."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        ladder = [rung.name if isinstance(rung, Preset) else rung for rung in self.ladder]
        return {**data, "options": dict(self.options), "ladder": ladder, "needs": list(self.needs)}


_AUTOTUNED = {"max_autotune": True, "epilogue_fusion": True}
_DYNAMIC = "dynamic shapes enabled"

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset(
                name="none",
                backend="eager",
                ladder=(),
                sets="eager",
                performance="baseline",
                overhead="none",
                memory="baseline",
                best_for="short runs, debugging, ruling compilation out",
            ),
            Preset(
                name="default",
                needs=("inductor",),
                sets=f"torch's default backend, {_DYNAMIC}",
                performance="good",
                overhead="medium",
                memory="medium",
                best_for="the first thing to try; runs of some thousand steps",
            ),
            Preset(
                name="inductor",
                options={**_AUTOTUNED, "triton.cudagraphs": False},
                needs=("inductor",),
                sets=f"Inductor, kernel autotuning, epilogue fusion, CUDA graphs off, {_DYNAMIC}",
                performance="better",
                overhead="medium-high",
                memory="medium-high",
                best_for="long runs whose shapes vary or whose outputs are kept",
            ),
            Preset(
                name="triton",
                options={**_AUTOTUNED, "triton.cudagraphs": True, "shape_padding": True},
                ladder=("inductor", "aot_eager", "none"),
                needs=("inductor", "gpu", "triton"),
                sets=f"Inductor with CUDA graphs, shape padding, autotuning, epilogue fusion, {_DYNAMIC} "
                "(each new size is one more CUDA graph and its memory)",
                performance="best",
                overhead="high",
                memory="high",
                best_for="long runs at fixed shapes on a recent GPU",
            ),
            Preset(
                name="aot_eager",
                backend="aot_eager",
                ladder=("none",),
                sets="ahead-of-time tracing, eager kernels, dynamic shapes; the most stable",
                performance="as eager",
                overhead="low",
                memory="low",
                best_for="finding out whether tracing or the kernels are at fault; little memory",
            ),
            Preset(
                name="reduce-overhead",
                mode="reduce-overhead",
                ladder=("default", "aot_eager", "none"),
                needs=("inductor", "gpu", "triton"),
                sets="torch's mode: Inductor with CUDA graphs (each new size is one more graph)",
                performance="best where launches dominate",
                overhead="medium",
                memory="medium-high",
                best_for="small batches and many small kernels at fixed shapes",
            ),
            Preset(
                name="max-autotune",
                mode="max-autotune",
                ladder=("max-autotune-no-cudagraphs", "default", "aot_eager", "none"),
                needs=("inductor", "gpu", "triton"),
                sets="torch's mode: autotuned products and convolutions, CUDA graphs (each new size is one more graph)",
                performance="best",
                overhead="very high",
                memory="high",
                best_for="runs of days at fixed shapes",
            ),
            Preset(
                name="max-autotune-no-cudagraphs",
                mode="max-autotune-no-cudagraphs",
                ladder=("default", "aot_eager", "none"),
                needs=("inductor",),
                sets="torch's mode: autotuned products and convolutions, no CUDA graphs",
                performance="better",
                overhead="very high",
                memory="medium-high",
                best_for="runs of days whose outputs are kept",
            ),
        )
    }
)
NAMES: tuple[str, ...] = tuple(PRESETS)

TROUBLESHOOTING: tuple[str, ...] = (
    "Try another backend: triton -> inductor -> default.",
    "Compile fewer components: leave out the one that the status names.",
    "AOT_EAGER: the most stable, it shows whether tracing or the kernels are at fault.",
    "none: eager. It always works, and it is an honest answer where compiling does not pay.",
)
"""What to try, in this order, when a preset fails or does not pay."""


def get(preset: str | Preset) -> Preset:
    """Return the preset of a name (in upper or lower case); a Preset is returned as it is.

    Raises:
        ConfigError: no preset has this name; the message names the nearest.
    """
    if isinstance(preset, Preset):
        return preset
    if not isinstance(preset, str):
        raise ConfigError(f"preset {preset!r}: expected a name or a hotloop.Preset, found {type(preset).__name__}")
    name = preset.strip().lower()
    if name not in PRESETS and name.replace("_", "-") in PRESETS:
        name = name.replace("_", "-")
    # These are values of a Loop's ``run=``, and no presets.
    if name in ("auto", "eager", "channels_last", "regional", "full", "autotune") or name.endswith("+graph"):
        raise ConfigError(
            f"preset {preset!r} does not exist: it says how a hotloop.Loop runs steps, Loop(model, optimizer, "
            f"run={name!r}); to compile in place expected one of {', '.join(sorted(NAMES))}"
        )
    if name not in PRESETS:
        raise ConfigError(f"preset {preset!r} does not exist: {expected(name, NAMES)}")
    return PRESETS[name]


def from_mapping(name: str, mapping: Mapping[str, Any]) -> Preset:
    """Build a user's own preset from a config file's mapping: ``base`` (a name), then any of Preset's settings.

    ``{"base": "inductor", "options": {"shape_padding": True}}`` adds to the base's options.

    Raises:
        ConfigError: the mapping has an unknown key, an unknown base or a value that does not fit.
    """
    fields = dict(mapping)
    base = get(fields.pop("base", "default"))
    known = {field.name for field in dataclasses.fields(Preset)} - {"name"}
    for key in fields:
        if key not in known:
            raise ConfigError(f"preset {name!r}: setting {key!r} does not exist: {expected(key, ['base', *known])}")
    if not isinstance(fields.get("options", {}), Mapping):
        raise ConfigError(f"preset {name!r}: options {fields['options']!r}: expected a mapping of option to value")
    # A mode replaces the base's options, since torch takes one or the other.
    inherited = {} if fields.get("mode") else base.options
    options = {**inherited, **fields.pop("options", {})}
    for key in ("ladder", "needs"):
        if key in fields:
            fields[key] = tuple(fields[key])
    for rung in fields.get("ladder", ()):
        get(rung)
    return dataclasses.replace(base, name=name, options=options, **fields)


def expected(wrong: str, valid: Iterable[str]) -> str:
    """Say what was expected: the nearest valid names first, then all of them."""
    names = sorted(valid)
    near = difflib.get_close_matches(wrong, names, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""
    if len(names) > 20:  # noqa: PLR2004 - a message that lists more names is not read
        return f"{hint}expected one of {len(names)} names".replace("? e", "? E")
    return f"{hint}expected one of {', '.join(names)}"
