"""Lightning's guide with real kernels: Inductor's options reach them."""

import pytest
from test_guide_lightning import fit, kinds, same

import hotloop
from hotloop.integrations.lightning import HotLoop

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch


@pytest.mark.inductor
@pytest.mark.campaign
def test_shape_padding_compiles_and_trains_as_eager():
    eager = fit()
    preset = hotloop.Preset(name="padded", options={"shape_padding": True})
    with hotloop.watch() as events:
        same(fit(HotLoop(preset)), eager)
    assert "compiled" in kinds(events)
