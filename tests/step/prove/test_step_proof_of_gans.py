"""Proofs of steps that go on computing with parameters that an optimizer has just stepped, as those of a GAN do.

A recording's optimizer kernels round differently from eager's, and what the second network's pass makes of it is magnified rounding.
"""

import pytest
import torch
from test_step_proof import WrongTape, cpu, declined_with
from torch import nn
from torch.nn import functional as F

from hotloop._torch.dispatch import name_of
from hotloop.step.capture.optimizers import furthest_rounded

__all__ = ["cpu"]


def adversarial(run, made, judge, draw, **settings):
    """Train a generator and a discriminator; ``draw`` gives what is real, and the generator's noise."""
    of_judge, of_made = (torch.optim.Adam(one.parameters(), betas=(0.5, 0.999), **settings) for one in (judge, made))

    @run.loop([made, judge], [of_made, of_judge]).step
    def train_step(real, noise):
        judge.zero_grad()
        judged = judge(real)
        yes, no = torch.ones_like(judged), torch.zeros_like(judged)
        right = F.binary_cross_entropy_with_logits(judged, yes)
        right.backward()
        fake = made(noise)
        false = F.binary_cross_entropy_with_logits(judge(fake.detach()), no)
        false.backward()
        of_judge.step()
        made.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(judge(fake), yes)
        fooled.backward()
        of_made.step()
        return right + false, fooled

    for _ in range(14):
        train_step(*draw())


def gan(dtype=torch.float32, **settings):
    """A generator and a discriminator with BatchNorm; a bias before it has a gradient of rounding alone."""

    def program(run):
        made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)).to(dtype)
        judge = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1)).to(dtype)
        draw = lambda: (torch.randn(6, 8, dtype=dtype), torch.randn(6, 4, dtype=dtype))  # noqa: E731
        adversarial(run, made, judge, draw, **{"lr": 1e-2, **settings})

    return program


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_that_computes_on_with_stepped_parameters_is_proven(cpu, dtype, seed):
    run, _ = cpu.run(gan(dtype), "eager+graph", seed=seed)
    assert not run.declined, run.declined
    assert run.status().tier == "eager+graph"
    assert run.replays()


def pictures(run):
    """A DCGAN, with the biases before BatchNorm that `nn.Conv2d` has unless they are left out."""
    up, down = nn.ConvTranspose2d, nn.Conv2d
    made = [up(10, 16, 4), nn.BatchNorm2d(16), nn.ReLU(), up(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU()]
    made += [up(8, 1, 4, 2, 1), nn.Tanh()]
    judge = [down(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), down(8, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2)]
    judge += [down(16, 1, 4), nn.Flatten(0)]
    draw = lambda: (torch.randn(16, 1, 16, 16), torch.randn(16, 10, 1, 1))  # noqa: E731
    adversarial(run, nn.Sequential(*made), nn.Sequential(*judge), draw, lr=2e-4, fused=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_fused_optimizer_whose_rate_is_no_float32_is_proven(cpu, seed):
    """Eager's kernel reads the rate as Python's float; whether a step shows that it was rounded is luck."""
    run, _ = cpu.run(pictures, "eager+graph", seed=seed)
    assert not run.declined, run.declined
    assert run.replays()


@pytest.mark.parametrize("rate", [1e-3, 2e-4, 3e-4, 0.1, 2**-12, 0.0])
def test_the_rate_that_noise_is_measured_with_is_the_float32_further_from_the_given_one(rate):
    near, far = torch.tensor(rate).item(), furthest_rounded(rate)
    assert torch.tensor(far).item() == far
    if near == rate:
        assert far == rate
    else:
        assert (near < rate < far) or (far < rate < near)
        assert abs(far - rate) >= abs(near - rate)


class WrongLoss(WrongTape):
    """Makes the gradient of every loss too long."""

    by = 0.0

    def after(self, operation, made):
        if name_of(operation) == "aten.native_batch_norm_backward":
            made[1].mul_(1 + self.by)


@pytest.mark.parametrize("settings", [{}, {"fused": True, "lr": 2e-4}])
@pytest.mark.parametrize("by", [1e-3, 1e-2])
def test_a_wrong_recording_of_such_a_step_is_declined(cpu, by, settings):
    declined_with(cpu, gan(**settings), "does not agree", "gradient of", tape=type("Wrong", (WrongLoss,), {"by": by}))
