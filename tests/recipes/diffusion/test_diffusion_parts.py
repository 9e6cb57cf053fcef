"""The parts of the diffusion trainer one by one: noise and its weights, tokens, validation, what a checkpoint holds."""

import math
import types

import pytest
import torch
from diffusers import DDPMScheduler
from diffusion_networks import SCHEDULE, tiny_denoiser, tiny_networks
from torch import nn

from hotloop.errors import ConfigError
from hotloop.recipes.diffusion.denoiser import mean_square
from hotloop.recipes.diffusion.noise import Noise, offset
from hotloop.recipes.diffusion.validation import LEAST, Fixed, MeanError
from hotloop.train import batches
from hotloop.train.average import Average
from hotloop.train.supervised import Supervised


def make_noise(prediction="epsilon", gamma=None, **more):
    return Noise(DDPMScheduler(**SCHEDULE, **more), prediction, gamma)


def latents(seed):
    return torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(seed))


TIMES = torch.tensor([0, 10, 500, 999])


def test_latents_are_noised_and_velocity_is_made_as_diffusers_schedulers_do_it():
    clean, noise, scheduler = latents(0), latents(1), DDPMScheduler(**SCHEDULE)
    torch.testing.assert_close(make_noise().add(clean, noise, TIMES), scheduler.add_noise(clean, noise, TIMES))
    velocity = make_noise("v_prediction").target(clean, noise, TIMES)
    torch.testing.assert_close(velocity, scheduler.get_velocity(clean, noise, TIMES))
    assert make_noise().target(clean, noise, TIMES) is noise


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_is_what_hang_et_al_write(prediction):
    """By hand, in Python floats: min(SNR, gamma) / SNR for the noise, min(SNR, gamma) / (SNR + 1) for velocity."""
    kept = DDPMScheduler(**SCHEDULE).alphas_cumprod.tolist()
    found = make_noise(prediction, 5.0).weight(TIMES).tolist()
    for time, weight in zip(TIMES.tolist(), found, strict=True):
        snr = kept[time] / (1 - kept[time])
        below = snr if prediction == "epsilon" else snr + 1
        assert weight == pytest.approx(min(snr, 5.0) / below, rel=1e-4)
    assert make_noise(prediction).weight(TIMES).tolist() == [1.0] * 4


def test_a_schedule_that_ends_in_noise_alone_takes_velocity_and_weighs_its_end_nothing():
    with pytest.raises(ConfigError, match=r"diffusion\.prediction=epsilon.*expected v_prediction"):
        make_noise("epsilon", rescale_betas_zero_snr=True)
    noise = make_noise("v_prediction", 5.0, rescale_betas_zero_snr=True)
    assert noise.weight(torch.tensor([999])).item() == pytest.approx(0.0, abs=1e-6)


def test_an_offset_is_one_value_a_channel_and_none_is_drawn_where_it_is_0():
    torch.manual_seed(0)
    base = torch.zeros(2, 3, 4, 4)
    shifted = offset(base, 0.1)
    assert torch.equal(shifted, shifted[..., :1, :1].expand_as(shifted))
    assert len(shifted[..., 0, 0].unique()) == 6
    before = torch.get_rng_state()
    assert offset(base, 0.0) is base
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_that_the_networks_do_not_take_are_refused_and_captions_that_are_cut_are_counted():
    found = tiny_networks()
    found.check([(8, 16)])
    assert found.cut(["a digit", "a digit digit", "a a a digit"]) == 2
    with pytest.raises(ConfigError, match=r"pictures of 12 x 8 pixels.*multiples of 8 a side: set pictures\.step=8"):
        found.check([(8, 12)])


def test_the_loss_of_a_batch_is_the_weighted_square_of_the_error_at_its_timesteps():
    denoiser, found = tiny_denoiser()
    mean, noise, times = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4), torch.tensor([5, 400, 990])
    ids = found.token_ids(["a digit"] * 3)["input_ids"]
    given = {"mean": mean, "logvar": torch.full_like(mean, -30.0), "input_ids": ids, "noise": noise, "timesteps": times}
    noisy = denoiser.noise.add(mean * found.vae.config.scaling_factor, noise, times)
    with torch.no_grad():
        predicted = found.unet(noisy, times, found.text_encoder(ids)[0]).sample
        squares = (predicted - noise).square().mean(dim=(1, 2, 3))
        ours = mean_square(denoiser(**given), times)
        judge = MeanError()
        denoiser.eval()
        judge.see(denoiser(**given), times)
    torch.testing.assert_close(ours, (squares * denoiser.noise.weight(times)).mean(), rtol=1e-4, atol=1e-6)
    assert judge.figures()["loss"] == pytest.approx(float(squares.mean()), rel=1e-5), "validation weighs nothing"


def test_training_draws_latents_and_offset_noise_and_validation_takes_the_likeliest(monkeypatch):
    denoiser, found = tiny_denoiser(noise_offset=3.0)
    seen = []
    monkeypatch.setattr(denoiser.noise, "add", lambda clean, noise, _: seen.append((clean, noise)) or clean)
    mean = torch.full((200, 2, 4, 4), 5.0)
    given = {"mean": mean, "logvar": torch.full_like(mean, math.log(4.0)), **found.token_ids(["a"] * 200)}
    with torch.no_grad():
        denoiser(**given)
        denoiser.eval()
        denoiser(**given, noise=torch.zeros_like(mean), timesteps=torch.zeros(200, dtype=torch.int64))
    (drawn, noise), (likeliest, zero) = seen
    scale = found.vae.config.scaling_factor
    assert float(drawn.mean()) == pytest.approx(5.0 * scale, rel=0.05)
    assert float(drawn.std()) == pytest.approx(2.0 * scale, rel=0.05), "a variance of 4"
    torch.testing.assert_close(likeliest, mean * scale)
    assert float(noise.mean(dim=(2, 3)).std()) == pytest.approx(3.0, rel=0.15)
    assert not zero.any()


def test_pictures_are_encoded_in_a_step_as_they_are_beforehand():
    denoiser, _ = tiny_denoiser()
    denoiser.eval()
    pixels, ids = torch.rand(2, 1, 4, 4), torch.zeros(2, 5, dtype=torch.int64)
    rest = {"input_ids": ids, "noise": torch.randn(2, 2, 4, 4), "timesteps": torch.tensor([3, 700])}
    mean, logvar = denoiser.vae(pixels)
    assert torch.equal(denoiser(pixels=pixels, **rest), denoiser(mean=mean, logvar=logvar, **rest))
    assert denoiser.latent_shape({"pixels": pixels}) == denoiser.latent_shape({"mean": mean}) == (2, 4, 4)


def test_a_share_of_captions_is_left_out_in_training_alone():
    denoiser, found = tiny_denoiser(caption_dropout=0.5)
    seen = []
    found.text_encoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids = found.token_ids(["a digit"] * 200)["input_ids"]
    given = {"mean": torch.zeros(200, 2, 4, 4), "logvar": torch.zeros(200, 2, 4, 4), "input_ids": ids}
    with torch.no_grad():
        denoiser(**given)
        denoiser.eval()
        denoiser(**given)
    empty = found.token_ids([""])["input_ids"][0]
    left = [int((one == empty).all(dim=1).sum()) for one in seen]
    assert 60 < left[0] < 140
    assert left[1] == 0


def test_what_is_frozen_stays_in_evaluation_mode_and_without_gradients():
    for text in (False, True):
        denoiser, found = tiny_denoiser(text=text)
        denoiser.train()
        assert (found.unet.training, found.text_encoder.training, found.vae.training) == (True, text, False)
        ids = found.token_ids(["a digit"])["input_ids"]
        mean_square(denoiser(mean=torch.ones(1, 2, 4, 4), logvar=torch.ones(1, 2, 4, 4), input_ids=ids), ids).backward()
        assert any(one.grad is not None for one in found.text_encoder.parameters()) == text
        assert all(one.grad is None for one in found.vae.parameters())


def test_validation_meets_the_same_noise_each_time_and_all_timesteps_evenly():
    data = batches.Table({"mean": torch.zeros(5, 2, 4, 4)}, torch.arange(5))
    data.apart = True
    fixed = Fixed(data, lambda inputs: tuple(inputs["mean"].shape[1:]), 1000, seed=3)
    assert len(fixed) == 5 * math.ceil(LEAST / 5)
    rows = torch.arange(len(fixed))
    one, again = fixed.take(rows), fixed.take(rows)
    assert torch.equal(one.inputs["noise"], again.inputs["noise"])
    assert torch.equal(fixed.take(rows[7:9]).inputs["noise"], one.inputs["noise"][7:9]), "whatever makes a batch"
    assert not torch.equal(one.inputs["noise"][0], one.inputs["noise"][5]), "the same picture, again"
    tenths = torch.histc(one.inputs["timesteps"].float(), 10, 0, 1000)
    assert int(tenths.min()) >= len(fixed) // 10 - 2


def test_an_average_follows_its_parameters_and_takes_their_place_for_a_while():
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(requires_grad=False)
    average = Average(model, 0.9)
    begin, memory = model.weight.detach().clone(), model.weight.data_ptr()
    with torch.no_grad():
        model.weight.fill_(1.0)
    average.update()
    expected = 0.9 * begin + 0.1
    torch.testing.assert_close(average.state_dict()["weight"], expected)
    assert list(average.state_dict()) == ["weight"], "what is frozen needs no average"
    with pytest.raises(ZeroDivisionError), average.in_place():
        torch.testing.assert_close(model.weight.detach(), expected)
        raise ZeroDivisionError
    assert torch.equal(model.weight.detach(), torch.ones(2, 2))
    torch.testing.assert_close(average.state_dict()["weight"], expected)
    assert model.weight.data_ptr() == memory


@pytest.mark.parametrize(("scale", "goes_on"), [(2.0, True), (0.5, False), (None, False)])
def test_gradients_that_overflow_end_the_run_only_where_the_scale_is_not_to_blame(scale, goes_on):
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    assert Supervised.overflows(types.SimpleNamespace(scaler=scaler)) is goes_on


def test_a_checkpoint_leaves_out_what_is_frozen():
    ours = tiny_denoiser()[0].state_dict()
    assert {name.split(".")[0] for name in ours} == {"unet"}
    again = tiny_denoiser()[0]
    again.load_state_dict({name: torch.ones_like(one) for name, one in ours.items()})
    assert all(bool((one == 1).all()) for one in again.unet.parameters())
    with pytest.raises(RuntimeError, match="Missing key"):
        again.load_state_dict({})
