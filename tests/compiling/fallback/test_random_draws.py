"""Equal random draws stay apart in compiled code: torch would merge those that its own list of them lacks."""

import torch
from torch.nn import functional as F

import hotloop


@torch.library.custom_op("hotloop_tests::drawn", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape)


@torch.library.custom_op("hotloop_tests::draw_into", mutates_args={"x"}, tags=(torch.Tag.nondeterministic_seeded,))
def draw_into(x: torch.Tensor) -> None:
    x.copy_(torch.randn(x.shape))


drawn.register_fake(torch.empty_like)
draw_into.register_fake(lambda x: None)


def drawn_into(x):
    made = torch.zeros(x.shape)
    draw_into(made)
    return made


DRAWS = {
    "normal": lambda x: torch.normal(x, 1.0),
    "normal_": lambda x: torch.zeros(x.shape).normal_(),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "uniform_": lambda x: torch.zeros(x.shape).uniform_(),
    "exponential_": lambda x: torch.zeros(x.shape).exponential_(),
    "rrelu": lambda x: F.rrelu(-1 - x.square(), training=True),
    "multinomial": lambda x: torch.multinomial(x.square() + 1, 3),
    "a custom operation": drawn,
    "a custom operation in place": drawn_into,
}


class Noisy(torch.nn.Module):
    """Draws each kind of noise twice from the same arguments, as the layers of a stack do."""

    def __init__(self, draws):
        super().__init__()
        self.scale, self.draws = torch.nn.Parameter(torch.ones(8)), draws

    def forward(self, x):
        return [[draw(x) * self.scale[:1] for _ in range(2)] for draw in self.draws]


def trained(model):
    """Return an optimizer and a step that pulls two noisy views of a batch together: trained by the noise alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        one, other = model(x)
        loss = (one - other).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return optimizer, step


def test_each_draw_is_one_of_its_own_and_the_numbers_are_eagers():
    model, x = Noisy(list(DRAWS.values())), torch.randn(4, 8)
    torch.manual_seed(3)
    expected = model(x)
    hotloop.compile(model, "aot_eager")
    torch.manual_seed(3)
    found = model(x)
    assert [name for name, (one, other) in zip(DRAWS, found, strict=True) if torch.equal(one, other)] == []
    torch.testing.assert_close(found, expected)
    assert hotloop.status(model).components["model"].running == "aot_eager"
