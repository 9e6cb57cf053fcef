"""The settings of a training run as typed, frozen dataclasses. What each is for, and its default, is in ``conf/``."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - coerce reads the types of the fields at run time
from dataclasses import dataclass, field
from typing import Any, Literal

from hotloop.errors import ConfigError


def _range(low: float | None = None, high: float | None = None, *, open_low: bool = False) -> Any:
    """Declare the range that a field's value must lie in; ``open_low`` leaves the lower end itself out."""
    return field(metadata={"low": low, "high": high, "open_low": open_low})


@dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """Which recipe runs, or which program of the user's own, and what a program's best validation is."""

    name: str
    goal: str | None = None


@dataclass(frozen=True, kw_only=True)
class ColumnSettings:
    """How the columns of a CSV are called."""

    text: str
    criterion: str
    label: str
    group: str


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where the pairs come from and how they are split."""

    source: Literal["icd10cm", "csv"]
    path: str | None
    columns: ColumnSettings
    delimiter: str
    on_bad_rows: Literal["error", "skip"]
    sample_size: int | None = _range(4)
    validation_fraction: float = _range(0.01, 0.5)
    negatives: Literal["chapter", "sibling"]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which encoder, and how its inputs are padded."""

    name: str
    max_length: int | Literal["auto"] = _range(4)
    buckets: tuple[int, ...] = _range(4)
    dropout: float | None = _range(0, 0.9)


@dataclass(frozen=True, kw_only=True)
class DigitsSettings:
    """The vision transformer of the recipe `digits`."""

    hidden_size: int = _range(8)
    layers: int = _range(1)
    heads: int = _range(1)
    patch_size: Literal[1, 2, 4]


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
    """The tokens and the GPT-2 of the recipe `language`."""

    vocabulary: int = _range(257, 65536)
    context: int = _range(8)
    hidden_size: int = _range(8)
    layers: int = _range(1)
    heads: int = _range(1)


@dataclass(frozen=True, kw_only=True)
class PicturesSettings:
    """Which captioned pictures, and the sizes that they are brought to."""

    source: Literal["digits", "fashion-mnist", "folder"]
    path: str | None
    size: int = _range(8, 4096)
    step: int = _range(1, 512)
    buckets: int = _range(1, 64)
    min_size: int = _range(1)
    skip_bad: bool

    def __post_init__(self) -> None:
        """Refuse values that fit alone and not together."""
        if self.source == "folder" and not self.path:
            raise ConfigError("pictures.path is not set: pictures.source=folder needs it, pictures.path=FOLDER")
        if self.size < self.step:
            raise ConfigError(
                f"pictures.size={self.size} is less than pictures.step={self.step}, of which every side is a multiple: "
                "raise the one, or lower the other"
            )
        if self.size % self.step:
            near = self.size // self.step * self.step
            raise ConfigError(
                f"pictures.size={self.size} is no multiple of pictures.step={self.step}, of which every side is one: "
                f"{near} and {near + self.step} are"
            )


@dataclass(frozen=True, kw_only=True)
class DiffusionSettings:
    """The networks of the recipe `diffusion`, how they are trained, and what is sampled of them."""

    model: str
    width: int = _range(8)
    autoencoder_steps: int = _range(10)
    train_text_encoder: bool
    lora_rank: int | None = _range(1)
    lora_alpha: float | None = _range(0, open_low=True)
    prediction: Literal["epsilon", "v_prediction"] | None
    min_snr_gamma: float | None = _range(0, open_low=True)
    noise_offset: float = _range(0, 1)
    caption_dropout: float = _range(0, 0.9)
    ema_decay: float | None = _range(0, 0.999999)
    gradient_checkpointing: bool
    cache: bool
    output: bool
    sample_every: int | None = _range(1)
    sample_steps: int = _range(1, 1000)
    guidance: float = _range(1)
    prompts: tuple[str, ...]
    samples: int = _range(1, 64)

    def __post_init__(self) -> None:
        """Refuse values that fit alone and not together."""
        if not self.model.strip():
            raise ConfigError("diffusion.model is empty: expected small, sd15, a folder or a hub name")
        if self.lora_rank is not None and self.model == "small":
            raise ConfigError(
                f"diffusion.lora_rank={self.lora_rank} with diffusion.model=small: its weights are random, so there is "
                "nothing to adapt; name the folder of a trained model, or leave diffusion.lora_rank out"
            )
        if self.width % 8:
            raise ConfigError(f"diffusion.width={self.width}: expected a multiple of 8, the groups of its norms")


@dataclass(frozen=True, kw_only=True)
class FocusSettings:
    """The texts, the working context and the networks of the recipe `focus`."""

    files: int = _range(1)
    vocabulary: int = _range(257, 65536)
    documents: int = _range(1)
    held_out: int = _range(1)
    blocks: int = _range(2)
    protected: int = _range(1)
    budget: int = _range(64)
    contexts: int = _range(3)
    rounds: int = _range(1)
    edits: int = _range(1)
    hidden_size: int = _range(8)
    layers: int = _range(1)
    heads: int = _range(1)
    lens_size: int = _range(8)
    lens_layers: int = _range(1)

    def __post_init__(self) -> None:
        """Refuse a text that cannot be taken from so many documents."""
        shared = self.blocks - self.protected
        if shared < 1:
            raise ConfigError(f"focus.protected={self.protected}: expected fewer than focus.blocks={self.blocks}")
        if shared % self.documents:
            divisors = ", ".join(str(one) for one in range(1, shared + 1) if not shared % one)
            raise ConfigError(
                f"focus.documents={self.documents} cannot share focus.blocks={self.blocks} less "
                f"focus.protected={self.protected} in equal pieces: expected one of {divisors}"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """What makes steps faster."""

    use_torch_compile: bool | Literal["auto"]
    use_bf16: bool
    use_fp16: bool

    def __post_init__(self) -> None:
        """Refuse two precisions at once."""
        if self.use_bf16 and self.use_fp16:
            raise ConfigError(
                "training.optimization.use_bf16=true and training.optimization.use_fp16=true: a run computes in one of "
                "them; leave one out"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The optimizer, its schedule, and when to stop and save."""

    num_epochs: int = _range(1)
    batch_size: int = _range(1)
    eval_batch_size: int = _range(1)
    gradient_accumulation: int = _range(1)
    learning_rate: float = _range(0, open_low=True)
    warmup_fraction: float = _range(0, 1)
    weight_decay: float = _range(0)
    max_grad_norm: float | None = _range(0, open_low=True)
    freeze_embeddings: bool
    early_stopping_patience: int | None = _range(1)
    max_steps: int | None = _range(1)
    checkpoint_every_steps: int | None = _range(1)
    optimization: OptimizationSettings


@dataclass(frozen=True, kw_only=True)
class ComponentSettings:
    """The presets of one component; None takes ``compile.preset`` and ``compile.inference``."""

    training: str | None = None
    inference: str | None = None


@dataclass(frozen=True, kw_only=True)
class PresetSettings:
    """A preset of the user's own: a base, and what is to differ from it; None is the base's."""

    base: str = "default"
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    ladder: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """What is compiled, how, and what to do when that fails."""

    preset: str
    inference: str
    components: Mapping[str, ComponentSettings]
    regions: Literal["auto", "whole", "blocks"]
    dynamic: bool | None
    fullgraph: bool
    options: Mapping[str, Any]
    ladder: tuple[str, ...] | None
    strict: bool
    measure_eager_steps: int = _range(0)
    presets: Mapping[str, PresetSettings]


@dataclass(frozen=True, kw_only=True)
class KfoldSettings:
    """Cross-validation: into how many folds the data is split, which of them a run holds out, and the inner search."""

    n_splits: int | None = _range(2)
    fold: int | None = _range(0)
    inner_trials: int | None = _range(1)
    inner_splits: int = _range(2)
    inner_fold: int | None = _range(0)

    def __post_init__(self) -> None:
        """Refuse a fold that there is none of."""
        for name, whole in (("fold", "n_splits"), ("inner_fold", "fold"), ("inner_trials", "n_splits")):
            if getattr(self, name) is not None and getattr(self, whole) is None:
                raise ConfigError(
                    f"kfold.{name}={getattr(self, name)} has no effect while kfold.{whole} is null: set it as well, "
                    f"such as kfold.{whole}={5 if whole == 'n_splits' else 0}, or leave kfold.{name} out"
                )
        for name, whole in (("fold", "n_splits"), ("inner_fold", "inner_splits")):
            fold, many = getattr(self, name), getattr(self, whole)
            if fold is not None and fold >= many:
                raise ConfigError(
                    f"kfold.{name}={fold}: expected 0 to {many - 1}, since folds are counted from 0 and "
                    f"kfold.{whole}={many}"
                )
        if self.inner_trials is not None and self.inner_fold is not None:
            raise ConfigError(
                f"kfold.inner_trials={self.inner_trials} and kfold.inner_fold={self.inner_fold}: a run that holds out "
                "an inner fold is a part of the inner search, and has none of its own; leave one of the two out"
            )


LOW_IS_GOOD = ("loss", "perplexity", "bits", "error", "mse", "mae", "nll", "entropy")
"""Words in the names of metrics of which a low one is good."""


@dataclass(frozen=True, kw_only=True)
class HpoSettings:
    """A search: how many trials of what, who chooses them, which are cut short, and where they are kept."""

    name: str
    folder: str
    n_trials: int = _range(1)
    workers: int = _range(1)
    timeout_seconds: float | None = _range(0, open_low=True)
    metric: str
    direction: Literal["maximize", "minimize"] | None
    also: tuple[str, ...] = ()
    sampler: Literal["tpe", "gp", "cmaes", "qmc", "random", "grid"]
    pruner: Literal["hyperband", "successive_halving", "median", "none"]
    startup_trials: int = _range(1)
    reduction_factor: int = _range(2)
    storage: str | None
    heartbeat_seconds: int = _range(1)
    keep_checkpoints: Literal["none", "best", "all"]
    enqueue: tuple[Mapping[str, Any], ...] = ()
    trial: Mapping[str, Any]
    space: Mapping[str, Any]

    @property
    def towards(self) -> Literal["maximize", "minimize"]:
        """What is done with the metric: as ``direction`` says, or as its name does."""
        low = any(word in self.metric.lower() for word in LOW_IS_GOOD)
        return self.direction or ("minimize" if low else "maximize")

    @property
    def objectives(self) -> dict[str, str]:
        """What is done with each metric: with ``metric`` first, and with those of ``also``."""
        words = {"max": "maximize", "min": "minimize"}
        further = (one.partition(":") for one in self.also)
        return {self.metric: self.towards, **{metric: words[wanted] for wanted, _, metric in further}}

    def __post_init__(self) -> None:
        """Refuse further metrics that cannot be read, or that the sampler cannot weigh."""
        for one in self.also:
            wanted, _, metric = one.partition(":")
            if wanted not in ("max", "min") or not metric or metric == self.metric:
                raise ConfigError(f"hpo.also={one!r}: expected max:<metric> or min:<metric>, and not hpo.metric again")
        if self.also and self.sampler == "cmaes":
            raise ConfigError(
                "hpo.also with hpo.sampler=cmaes: it weighs one metric; take tpe, gp, random, qmc or grid"
            )


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The run itself: seed, device, folder, resuming and loggers."""

    seed: int = _range(0, 2**32 - 1)
    device: str
    folder: str | None
    resume: str | None
    on_full_disk: Literal["continue", "wait"]
    logger: Literal["none", "csv", "tensorboard", "mlflow", "wandb"]
    tracking: str | None
    project: str | None


GROUP = "program"
"""The group of a program's own settings, whose names and types are those of its function's parameters."""

STILL_COMPARABLE = (
    "run", "compile", "training.optimization.use_torch_compile", "training.eval_batch_size",
    "training.checkpoint_every_steps",
)  # fmt: skip
"""Settings, or groups of them, that may change while a search or a cross-validation goes on: its runs stay comparable.
Of the group ``run`` all but its seed."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that a run was told, validated."""

    recipe: RecipeSettings
    data: DataSettings
    model: ModelSettings
    digits: DigitsSettings
    language: LanguageSettings
    pictures: PicturesSettings
    diffusion: DiffusionSettings
    focus: FocusSettings
    training: TrainingSettings
    compile: CompileSettings
    kfold: KfoldSettings
    hpo: HpoSettings
    run: RunSettings
    program: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse values that fit alone and not together."""
        if self.data.source == "csv" and not self.data.path:
            raise ConfigError("data.path is not set: data.source=csv needs the file, data.path=pairs.csv")
        if self.data.source != "csv" and self.data.path:
            raise ConfigError(
                f"data.path={self.data.path!r} is set and data.source={self.data.source} does not read it: "
                "set data=csv to train on your own file"
            )
        if len(self.data.delimiter) != 1:
            raise ConfigError(f"data.delimiter={self.data.delimiter!r}: expected one character, such as ',' or ';'")
        for group, net in (("digits", self.digits), ("language", self.language), ("focus", self.focus)):
            if net.hidden_size % net.heads:
                raise ConfigError(
                    f"{group}.hidden_size={net.hidden_size} cannot be shared by {group}.heads={net.heads}: "
                    "expected a multiple of it"
                )
        if self.focus.lens_size % self.focus.heads:
            raise ConfigError(
                f"focus.lens_size={self.focus.lens_size} cannot be shared by focus.heads={self.focus.heads}: expected "
                "a multiple of it"
            )
        if not self.model.name.strip():
            raise ConfigError("model.name is empty: expected a folder, a hub name or minilm-l6")
        asked = str(self.training.optimization.use_torch_compile).lower()
        if self.compile.fullgraph and asked != "true":
            raise ConfigError(
                f"compile.fullgraph=true has no effect while training.optimization.use_torch_compile={asked}: "
                "set the latter to true, or leave compile.fullgraph out"
            )
