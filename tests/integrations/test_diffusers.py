"""diffusers: parts by name, LoRA through peft, offloading, gradient checkpointing."""

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.hooks import apply_group_offloading
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel

import hotloop
from hotloop import events as ev
from hotloop.diagnose import diagnose
from hotloop.errors import ConfigError
from hotloop.integrations.diffusers import Parts, compile  # noqa: A004 - hotloop.compile's name


def small_unet(up="CrossAttnUpBlock2D"):
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=4, in_channels=2, out_channels=2, block_out_channels=(8,), norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=(up,), mid_block_type=None,
        layers_per_block=1, cross_attention_dim=8, attention_head_dim=4,
    )  # fmt: skip


def small_vae():
    return AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=2).requires_grad_(
        requires_grad=False
    )


BATCH = (torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 4]), torch.ones(2, 3, 8))


def gradients(unet):
    """Run one forward and backward; return the output and each gradient."""
    unet.zero_grad()
    found = unet(*BATCH).sample
    if found.requires_grad:
        F.mse_loss(found, torch.zeros_like(found)).backward()
    return [found.detach(), *(one.grad.clone() for one in unet.parameters() if one.grad is not None)]


def test_of_named_parts_the_denoiser_alone_is_compiled():
    parts = Parts(unet=small_unet(), vae=small_vae(), scheduler=object())
    compile(parts, "aot_eager")
    status = hotloop.status(parts)
    assert {name: one.requested for name, one in status.components.items()} == {"unet": "aot_eager", "vae": "none"}
    assert "scheduler" in str(status)
    with pytest.raises(ConfigError, match="no pipeline"):
        compile(small_vae())
    with pytest.raises(ConfigError, match="modules by name"):
        Parts(scheduler=object())


def test_parts_without_a_denoiser_are_compiled_by_name_only():
    parts = Parts(vae=small_vae(), scheduler=object())
    with pytest.raises(ConfigError, match=r"no denoiser \(unet or transformer\).*the parts are: vae; name what"):
        compile(parts)
    assert hotloop.status(parts).components["vae"].requested == "none"
    compile(parts, {"vae": "aot_eager"})
    assert hotloop.status(parts).components["vae"].requested == "aot_eager"


def test_what_the_user_compiled_by_torchs_own_means_is_refused_or_told(caplog):
    with pytest.raises(ConfigError, match=r"pipeline\.unet\._orig_mod"):
        compile(Parts(unet=torch.compile(small_unet(), backend="aot_eager")), "aot_eager")
    unet = small_unet()
    unet.compile_repeated_blocks(backend="aot_eager")
    own = [one._compiled_call_impl for one in unet.modules()]
    parts = compile(Parts(unet=unet), "aot_eager")
    assert "torch compiled down_blocks.0" in caplog.text
    hotloop.uncompile(parts)
    assert [one._compiled_call_impl for one in unet.modules()] == own


@pytest.mark.campaign
def test_a_real_pipeline_its_denoiser_or_the_parts_that_are_named(tmp_path):
    torch.manual_seed(0)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )
    )  # fmt: skip
    pipe = StableDiffusionPipeline(
        vae=small_vae(), text_encoder=text, tokenizer=None, unet=small_unet(), scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)

    def sample():
        words = pipe.text_encoder(torch.arange(6).view(2, 3)).last_hidden_state
        start = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(1))
        return pipe(
            prompt_embeds=words, latents=start, num_inference_steps=2, guidance_scale=1.0, height=8, width=8,
            output_type="pt",
        ).images  # fmt: skip

    eager = sample()
    assert compile(pipe, "aot_eager") is pipe
    torch.testing.assert_close(sample(), eager, rtol=1e-4, atol=1e-5)
    states = {name: one.state for name, one in hotloop.status(pipe).components.items()}
    assert states == {"unet": "compiled", "vae": "eager", "text_encoder": "eager"}
    assert "eager: vae, text_encoder" in str(hotloop.status(pipe))
    compile(pipe, dict.fromkeys(states, "aot_eager"))
    torch.testing.assert_close(sample(), eager, rtol=1e-4, atol=1e-5)
    found = {name: one.state for name, one in hotloop.status(pipe).components.items()}
    assert found == dict.fromkeys(states, "compiled"), "the VAE's decode() as well, which is not its call"
    pipe.unet.save_pretrained(tmp_path)
    again = UNet2DConditionModel.from_pretrained(tmp_path)
    assert list(again.state_dict()) == list(small_unet().state_dict())


def test_a_model_that_is_offloaded_is_left_alone_and_said(caplog):
    unet = small_unet()
    apply_group_offloading(unet, torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level")
    parts = Parts(unet=unet, vae=small_vae())
    with hotloop.watch() as events, caplog.at_level("WARNING", "hotloop"):
        compile(parts, {"unet": "aot_eager"})
    (event,) = events
    assert isinstance(event, ev.NoEffect)
    assert "is offloaded" in event.reason
    assert caplog.text.count("is offloaded") == 1
    gradients(unet)
    found = hotloop.status(parts).components["unet"]
    assert (found.requested, found.running, found.state) == ("aot_eager", "none", "eager")
    assert [(cause.reason, cause.hint) for cause in found.causes] == [(event.reason, event.hint)]
    (advice,) = diagnose({"events": [event.to_dict()], "components": hotloop.status(parts).to_dict()["components"]})
    assert (advice.kind, advice.component) == ("offloaded", "unet")
    hotloop.uncompile(parts)
    assert hotloop.status(parts).components["unet"].requested == "none"
    with pytest.raises(ConfigError, match=r"inference={'uent': .*did you mean 'unet'"):
        compile(parts, "aot_eager", inference={"uent": "none"})
