"""The settings of a training run as frozen pydantic models. What each is for, and its default, is in ``conf/``."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - pydantic reads the types of the fields at run time
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hotloop.errors import ConfigError
from hotloop.train.parameters import Optimizer, ScheduleName  # noqa: TC001 - as above
from hotloop.train.recipe_settings import (  # noqa: TC001 - pydantic reads the types of the fields
    DiffusionSettings,
    FocusSettings,
    PicturesSettings,
)
from hotloop.train.schema import Group


class RecipeSettings(Group):
    """Which recipe runs, or which program of the user's own, and what a program's best validation is."""

    name: str
    goal: str | None = Field(None, pattern=r"^(max|min):\s*\S")

    @property
    def wanted(self) -> tuple[str, Literal["maximize", "minimize"]] | None:
        """What a program's best validation is: a metric, and what is done with it."""
        towards, _, metric = (self.goal or "").partition(":")
        return (metric.strip(), "maximize" if towards == "max" else "minimize") if self.goal else None


class ColumnSettings(Group):
    """How the columns of a CSV are called."""

    text: str
    criterion: str
    label: str
    group: str


class DataSettings(Group):
    """Where the pairs come from and how they are split."""

    source: Literal["icd10cm", "csv"]
    path: str | None
    columns: ColumnSettings
    delimiter: str = Field(min_length=1, max_length=1)
    on_bad_rows: Literal["error", "skip"]
    sample_size: int | None = Field(ge=4)
    validation_fraction: float = Field(ge=0.01, le=0.5)
    negatives: Literal["chapter", "sibling"]

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse values that fit alone and not together."""
        if (self.source == "csv") != bool(self.path):
            raise ConfigError(f"data.path={self.path!r} with data.source={self.source}: set data=csv data.path=FILE")
        return self


class ModelSettings(Group):
    """Which encoder, and how its inputs are padded."""

    name: str = Field(pattern=r"\S")
    max_length: Annotated[int, Field(ge=4)] | Literal["auto"]
    buckets: tuple[Annotated[int, Field(ge=4)], ...]
    dropout: float | None = Field(ge=0, le=0.9)


class OptimizationSettings(Group):
    """What makes steps faster."""

    use_torch_compile: bool | Literal["auto"]
    use_bf16: bool
    use_fp16: bool


class TrainingSettings(Group):
    """The optimizer, its schedule, and when to stop and save."""

    num_epochs: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    eval_batch_size: int = Field(ge=1)
    gradient_accumulation: int = Field(ge=1)
    optimizer: Optimizer = "AdamW"
    optimizer_options: Mapping[str, Any] = {}
    learning_rate: float = Field(gt=0)
    schedule: ScheduleName = "linear"
    warmup_fraction: float = Field(ge=0, le=1)
    weight_decay: float = Field(ge=0)
    max_grad_norm: float | None = Field(gt=0)
    ema_decay: float | None = Field(None, ge=0, le=0.999999)
    freeze_embeddings: bool
    early_stopping_patience: int | None = Field(ge=1)
    max_steps: int | None = Field(ge=1)
    checkpoint_every_steps: int | None = Field(ge=1)
    checkpoint_every_minutes: float | None = Field(None, gt=0)
    optimization: OptimizationSettings


class ComponentSettings(Group):
    """The presets of one component; None takes ``compile.preset`` and ``compile.inference``."""

    training: str | None = None
    inference: str | None = None


class PresetSettings(Group):
    """A preset of the user's own: a base, and what is to differ from it; None is the base's."""

    base: str = "default"
    mode: str | None = None
    options: Mapping[str, Any] = {}
    dynamic: bool | None = None
    ladder: tuple[str, ...] | None = None


class CompileSettings(Group):
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
    measure_eager_steps: int = Field(ge=0)
    layout: Literal["auto", "channels_last", "as-given"] = "auto"
    sentinel: float = Field(0.01, ge=0, le=1)
    presets: Mapping[str, PresetSettings]


Workers = Annotated[int, Field(ge=1)] | Literal["auto"]


class KfoldSettings(Group):
    """Cross-validation: into how many folds the data is split, which of them a run holds out, and the inner search."""

    n_splits: int | None = Field(ge=2)
    fold: int | None = Field(ge=0)
    inner_trials: int | None = Field(ge=1)
    inner_splits: int = Field(ge=2)
    inner_fold: int | None = Field(ge=0)
    workers: Workers = 1
    engine: Literal["local", "ray"] = "local"

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse a fold that there is none of."""
        for name, whole in (("fold", "n_splits"), ("inner_fold", "fold"), ("inner_trials", "n_splits")):
            if getattr(self, name) is not None and getattr(self, whole) is None:
                raise ConfigError(f"kfold.{name} has no effect while kfold.{whole} is null: set that, or leave it out")
        for name, whole in (("fold", "n_splits"), ("inner_fold", "inner_splits")):
            fold, many = getattr(self, name), getattr(self, whole)
            if fold is not None and fold >= many:
                raise ConfigError(f"kfold.{name}={fold}: expected 0 to {many - 1}, as kfold.{whole}={many}")
        if self.inner_trials is not None and self.inner_fold is not None:
            raise ConfigError("kfold.inner_trials and kfold.inner_fold: a run has one of the two; leave the other out")
        return self


LOW_IS_GOOD = ("loss", "perplexity", "bits", "error", "mse", "mae", "nll", "entropy")
"""Words in the names of metrics of which a low one is good."""


def usual_direction(metric: str) -> Literal["maximize", "minimize"]:
    """Return what is done with a metric where nobody says: its name tells."""
    return "minimize" if any(word in metric.lower() for word in LOW_IS_GOOD) else "maximize"


class HpoSettings(Group):
    """A search: how many trials of what, who chooses them, which are cut short, and where they are kept."""

    name: str
    folder: str
    n_trials: int = Field(ge=1)
    workers: Workers
    engine: Literal["local", "ray"] = "local"
    timeout_seconds: float | None = Field(gt=0)
    metric: str | None
    direction: Literal["maximize", "minimize"] | None
    sampler: Literal["tpe", "gp", "cmaes", "qmc", "random", "grid"]
    pruner: Literal["hyperband", "successive_halving", "median", "none"]
    startup_trials: int = Field(ge=1)
    reduction_factor: int = Field(ge=2)
    storage: str | None
    heartbeat_seconds: int = Field(ge=1)
    keep_checkpoints: Literal["none", "best"]
    enqueue: tuple[Mapping[str, Any], ...] = ()
    trial: Mapping[str, Any]
    space: Mapping[str, Any]

    @property
    def towards(self) -> Literal["maximize", "minimize"]:
        """What is done with the metric: as ``direction`` says, or as its name does."""
        return self.direction or usual_direction(self.metric or "")

    @property
    def at_once(self) -> int:
        """How many trials run at the same time; one while nobody has looked what ``auto`` stands for."""
        return 1 if isinstance(self.workers, str) else self.workers


class CacheSettings(Group):
    """What is kept of compiled code for other machines."""

    share: str | None

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse what can be no shared cache."""
        if self.share is not None:
            from hotloop.cache.share import check_url  # noqa: PLC0415 - loads torch

            check_url(self.share)
        return self


class EngineSettings(Group):
    """The Ray cluster that runs trials or folds, and what each of them needs of it."""

    address: str = "auto"
    num_cpus: float = Field(default=1, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)


Logger = Literal["csv", "tensorboard", "mlflow", "wandb"]


class RunSettings(Group):
    """The run itself: seed, device, folder, resuming and loggers."""

    seed: int = Field(ge=0, le=2**32 - 1)
    device: str
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    devices: int = Field(1, ge=1)
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"] | None = None
    folder: str | None
    resume: str | None
    storage: str | None = None
    logger: Literal["none", "csv", "tensorboard", "mlflow", "wandb"] | tuple[Logger, ...]
    log_every: int = Field(ge=1)
    tracking: str | None
    project: str | None

    @property
    def loggers(self) -> tuple[str, ...]:
        """The loggers, each once."""
        named = (self.logger,) if isinstance(self.logger, str) else self.logger
        return tuple(dict.fromkeys(name for name in named if name != "none"))

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse what can be no storage."""
        if self.storage is not None:
            from hotloop.places import check_url  # noqa: PLC0415 - asks fsspec

            check_url(self.storage, "run.storage", "keeps runs on this machine alone")
        return self


GROUP = "program"
"""The group of a program's own settings, whose names and types are those of its function's parameters."""


class Settings(Group):
    """Everything that a run was told, validated."""

    recipe: RecipeSettings
    data: DataSettings
    model: ModelSettings
    pictures: PicturesSettings
    diffusion: DiffusionSettings
    focus: FocusSettings
    training: TrainingSettings
    compile: CompileSettings
    kfold: KfoldSettings
    hpo: HpoSettings
    cache: CacheSettings
    engine: EngineSettings = EngineSettings()
    run: RunSettings
    program: Mapping[str, Any] = {}

    @property
    def precision(self) -> str:
        """What steps compute in: ``run.precision``, or what ``use_bf16`` and ``use_fp16`` are short for."""
        short = self.training.optimization
        return self.run.precision or ("bf16-mixed" if short.use_bf16 else "16-mixed" if short.use_fp16 else "32-true")

    @model_validator(mode="after")
    def check_precision(self) -> Self:
        """Refuse a precision and the short form of another."""
        for name, means in (("use_bf16", "bf16-mixed"), ("use_fp16", "16-mixed")):
            if getattr(self.training.optimization, name) and self.precision != means:
                raise ConfigError(
                    f"run.precision={self.precision} and training.optimization.{name}=true, which is short for "
                    f"{means}: leave one out"
                )
        return self
