"""Settings that do nothing beside others: refused before anything begins, or said; and what a run's report lists."""

import pytest

from hotloop.errors import ConfigError
from hotloop.train import configure, idle, kfold, start
from hotloop.train.search import preparing

DIFFUSION = ["recipe=diffusion", "run.device=cpu"]
AUTO = "training.optimization.use_torch_compile=auto"
ON = "training.optimization.use_torch_compile=true"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([ON, "compile.layout=channels_last"], r"compile\.layout='channels_last' has no effect while .*=true: "),
        ([ON, "compile.sentinel=0.1"], r"compile\.sentinel=0\.1 has no effect while .*_compile=true: "),
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
    ("settings", "said"),
    [
        ([], ""),
        ([AUTO, "compile.layout=channels_last", "compile.sentinel=0.1"], ""),
        ([ON, "compile.preset=inductor"], ""),
        (
            ["compile.preset=inductor", "cache.share=here"],
            "compile.preset='inductor', cache.share='here' have no effect",
        ),
        ([AUTO, "compile.preset=inductor"], "compile.preset='inductor' has no effect while "),
    ],
)
def test_what_is_read_or_only_switched_off_may_stay_and_the_latter_is_said(settings, said):
    found = configure.load([*DIFFUSION, *settings])
    idle.refuse_idle(found)
    assert [line.startswith(said) for line in idle.remarks(found)] == [True] * bool(said)


def test_a_report_leaves_out_what_does_nothing_beside_others():
    found = idle.only_read(configure.load(DIFFUSION))
    assert not {"compile", "hpo", "engine", "focus", "model"} & set(found)
    assert "diffusion" in found
