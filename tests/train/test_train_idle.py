"""Settings that do nothing beside others: refused before anything begins, or said; and what a run's report lists."""

import pytest

from hotloop.errors import ConfigError
from hotloop.train import configure, idle, kfold, nested, schema, start
from hotloop.train.scope import RECIPES, within
from hotloop.train.search import preparing
from hotloop.train.settings import Settings

DIFFUSION = ["recipe=diffusion", "run.device=cpu"]
AUTO = "training.optimization.use_torch_compile=auto"
ON = "training.optimization.use_torch_compile=true"
ENCODES = "compile.components.text_encoder.inference='default'"
FOLDER = ["pictures=folder", "pictures.path=somewhere"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["pictures.buckets=4"], r"pictures\.buckets=4 has no effect while pictures\.source=digits: .*one size"),
        (
            ["pictures.min_size=9", "pictures.skip_bad=true"],
            r"pictures\.min_size=9, pictures\.skip_bad=True have no effect",
        ),
        (["pictures.path=x"], r"pictures\.path='x' has no effect while pictures\.source=digits: .*pictures=folder"),
        (
            ["diffusion.model=folder", "diffusion.autoencoder_steps=90"],
            r"diffusion\.autoencoder_steps=90 has no effect while diffusion\.model=folder: .*their VAE is used as it is",
        ),
        (
            ["diffusion.model=sd15", "diffusion.width=32"],
            r"diffusion\.width=32 has no effect while diffusion\.model=sd15",
        ),
        (["diffusion.lora_alpha=4"], r"diffusion\.lora_alpha=4\.0 has no effect while diffusion\.lora_rank=null"),
        (
            [ON, "compile.components.text_encoder.training=aot_eager"],
            r"text_encoder\.training='aot_eager' has no effect while diffusion\.train_text_encoder=false: .*\.inference",
        ),
        (
            [ON, "compile.layout=channels_last"],
            r"compile\.layout='channels_last' has no effect while .*=true: .*auto has",
        ),
        ([ON, "compile.sentinel=0.1"], r"compile\.sentinel=0\.1 has no effect while .*_compile=true: no loop owns"),
    ],
)
def test_a_setting_that_does_nothing_beside_others_is_refused_before_anything_begins(tmp_path, settings, said):
    folder = f"run.folder={tmp_path / 'run'}"
    with pytest.raises(ConfigError, match=said):
        start.prepare([*DIFFUSION, folder, *settings])
    with pytest.raises(ConfigError, match=said):
        kfold.prepare([*DIFFUSION, folder, "kfold.n_splits=2", *settings])
    with pytest.raises(ConfigError, match=said):
        preparing.check(configure.load([*DIFFUSION, *settings]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "settings",
    [
        [],
        [*FOLDER, "pictures.buckets=4", "pictures.min_size=9", "pictures.skip_bad=true"],
        ["diffusion.autoencoder_steps=90", "diffusion.width=32"],
        ["diffusion.model=folder", "diffusion.lora_rank=4", "diffusion.lora_alpha=4"],
        ["diffusion.train_text_encoder=true", "compile.components.text_encoder.training=aot_eager"],
        ["diffusion.cache=false", "compile.components.vae.inference=aot_eager"],
        [AUTO, "compile.layout=channels_last", "compile.sentinel=0.1"],
        ["compile.layout=channels_last", "compile.sentinel=0.1"],
    ],
)
def test_settings_that_are_read_and_defaults_are_not_refused(settings):
    idle.refuse_idle(configure.load([*DIFFUSION, *settings]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], []),
        (["diffusion.output=false"], []),
        (["diffusion.output=false", "diffusion.sample_every=5", "diffusion.samples=2"], []),
        (
            ["compile.preset=inductor"],
            ["compile.preset='inductor' has no effect while training.optimization.use_torch"],
        ),
        (["cache.share=here"], ["cache.share='here' has no effect while training.optimization.use_torch"]),
        ([AUTO, "cache.share=here"], []),
        (
            ["compile.components.unet.training=inductor"],
            [
                "compile.components.unet.training='inductor' has no effect while training.optimization.use_torch_compile=f"
            ],
        ),
        ([ON, ENCODES], []),
        ([ON, ENCODES, "diffusion.output=false", "diffusion.cache=false"], []),
        (["compile.preset=inductor", "training.optimization.use_torch_compile=true"], []),
        (
            [AUTO, "compile.preset=inductor", "compile.components.unet.training=triton", "compile.dynamic=true"],
            [
                "compile.preset='inductor', compile.components.unet.training='triton' have no effect",
                "compile.dynamic=True",
            ],
        ),
        ([AUTO, "compile.components.unet.inference=default", "compile.dynamic=true"], []),
        (["run.project=y", "run.logger=wandb"], []),
        (
            ["compile.layout=as-given"],
            ["compile.layout='as-given' has no effect while training.optimization.use_torch"],
        ),
        ([AUTO, "compile.layout=as-given", "compile.sentinel=0"], []),
    ],
)
def test_what_is_only_switched_off_may_stay_and_is_said(settings, said):
    found = configure.load([*DIFFUSION, *settings])
    idle.refuse_idle(found)
    told = idle.remarks(found)
    assert len(told) == len(said)
    assert all(line.startswith(beginning) for line, beginning in zip(told, said, strict=True))


def test_a_search_may_vary_what_makes_a_setting_count():
    ranks = "+hpo.space.diffusion.lora_rank={choices: [4, 8]}"
    preparing.check(configure.load([*DIFFUSION, "diffusion.model=folder", "diffusion.lora_alpha=4", ranks]))
    widths = "+hpo.space.diffusion.width={choices: [32, 64]}"
    preparing.check(configure.load([*DIFFUSION, widths]))


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_report_lists_what_the_recipe_reads_alone(recipe):
    name = "recipe.name='program.py:make'" if recipe == "workload" else "run.seed=0"
    settings = configure.load([f"recipe={recipe}", name, "training.optimization.use_torch_compile=true"])
    found = idle.only_read(settings)
    others = {"digits", "pictures", "diffusion", "focus", "model"}
    assert others & set(found) == {one.split(".")[0] for one in RECIPES[recipe][0]} & others
    assert "hpo" not in found
    assert found["compile"]["preset"] == "default"
    assert ("batch_size" in found["training"]) == (recipe != "workload")


def test_a_report_leaves_out_what_does_nothing_beside_others():
    found = idle.only_read(configure.load([*DIFFUSION, "diffusion.model=sd15", "diffusion.output=false"]))
    assert "compile" not in found
    assert not {"buckets", "path"} & set(found["pictures"])
    assert not {"width", "autoencoder_steps", "lora_alpha"} & set(found["diffusion"])
    assert found["diffusion"]["lora_rank"] is None


def test_rules_name_settings_that_there_are():
    known = [configure.to_dict(configure.load(given)) for given in ([], DIFFUSION)]  # components are their recipe's
    names = {*schema.names(Settings), *(name for one in known for name in dict(nested.leaves(one)))}
    for rule in idle.RULES:
        assert all(any(within(one, [name]) for one in names) for name in rule.on)
        assert all(any(within(one, [name]) for one in names) for name in rule.names), rule.names
