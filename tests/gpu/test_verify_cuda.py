"""`hotloop.verify` and the sentinel on a GPU: TF32, bfloat16, masks drawn by CUDA kernels, recordings as candidates."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hotloop
from hotloop import events as ev
from hotloop._torch.capture import captures_waited_for
from hotloop._torch.upcast import recording_draws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Inductor suggests TF32 on such a card, and uses deprecated parts of torch: an error there would break a lowering.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Net(nn.Module):
    """Attention with dropout, an MLP with gelu, and a normalisation."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout, activation="gelu", batch_first=True)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.layer(self.embed(x)).mean(1))


def workload(dropout=0.1, autocast=None):
    torch.manual_seed(0)
    model = Net(dropout).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(x, y):
        with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    draws = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(32, 12, 16, generator=draws).cuda(), torch.randint(5, (32,), generator=draws).cuda())
        for _ in range(6)
    ]
    return hotloop.Workload(model, optimizer, step, batches)


@pytest.fixture(params=["highest", "high"])
def precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.inductor
@pytest.mark.parametrize("preset", ["inductor", "reduce-overhead"])
def test_right_code_passes_in_float32_and_tf32(precision, preset):
    verdict = hotloop.verify(workload(), preset)
    assert verdict.passes, str(verdict)
    assert verdict.compute_dtype == ("float32" if precision == "highest" else "tf32")
    assert verdict.reference == "float64", verdict.reference_why
    assert verdict.visible < (1e-4 if precision == "highest" else 2e-2)


def test_a_replay_right_after_a_capture_draws_eagers_numbers_though_the_gpu_is_late():
    """As where another process has the GPU: the capture's stream comes late to what a capture writes as it begins."""
    x, side = torch.ones(4096, device="cuda"), torch.cuda.Stream()
    first = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, stream=side):
        F.dropout(x)
    first.replay()  # so that no kernel is loaded, which would wait, between the capture and the replay below
    F.dropout(x)  # so that the offset is not the 0 that a capture begins with
    state = torch.cuda.get_rng_state()
    eager = F.dropout(x)
    torch.cuda.set_rng_state(state)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with captures_waited_for():
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)  # some 0.1 s: in this time a replay that does not wait would begin
            graph.capture_begin()
            torch.cuda._sleep(800_000_000)  # and would draw later, with what the capture has written meanwhile
            drawn = F.dropout(x)
            graph.capture_end()
        torch.cuda.set_rng_state(state)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(drawn, eager)


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_right_code_passes_under_autocast(dtype):
    verdict = hotloop.verify(workload(autocast=dtype), "inductor")
    assert verdict.passes, str(verdict)
    assert verdict.reference == "float64", verdict.reference_why


@pytest.mark.parametrize("kernel", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("keys", [12, 77])
def test_a_fused_kernels_mask_is_drawn_again(kernel, keys):
    """As its noted call finds out; keys that are more than a value is wide take several calls for one mask."""
    torch.manual_seed(0)
    shapes = [(3, 4, 33, 16), (3, 4, keys, 16), (3, 4, keys, 16)]
    query, key, value = (torch.randn(*one, device="cuda", dtype=torch.bfloat16) for one in shapes)
    draws, state = [], torch.cuda.get_rng_state()
    with sdpa_kernel(kernel):
        plain = F.scaled_dot_product_attention(query, key, value, dropout_p=0.2)
        after = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        with recording_draws(draws):
            noted = F.scaled_dot_product_attention(query, key, value, dropout_p=0.2)
    assert torch.equal(plain, noted)
    assert torch.equal(after, torch.cuda.get_rng_state())
    (draw,) = draws
    assert draw.fused is not None
    assert draw.fused.why == ""
    torch.cuda.set_rng_state(state)
    mask = draw.fused.mask((3, 4, 33, keys), query.device)
    assert torch.equal(after, torch.cuda.get_rng_state())
    assert 0.7 < mask.float().mean() < 0.9
    weights = (query.double() @ key.double().transpose(-1, -2) / 4).softmax(-1)
    torch.testing.assert_close((weights * mask / 0.8) @ value.double(), noted.double(), rtol=0.05, atol=0.05)


def test_the_float32_reference_multiplies_in_float32(precision):
    """And the setting comes back."""
    from hotloop._torch.upcast import widened

    a, b = (torch.randn(256, 256, device="cuda") for _ in range(2))
    exact = (a.double() @ b.double()).float()
    before = torch.backends.cuda.matmul.fp32_precision
    with widened(torch.float32, []):
        error = (a @ b - exact).norm() / exact.norm()
    assert error < 1e-5
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert torch.get_float32_matmul_precision() == precision


def test_dropout_masks_in_float64_are_those_of_the_step():
    """eager's error against float64 is rounding: other masks would be another step."""
    verdict = hotloop.verify(workload(dropout=0.4), "aot_eager", search=False)
    assert verdict.passes, str(verdict)
    assert verdict.reference == "float64", verdict.reference_why
    assert verdict.visible < 1e-4


@pytest.mark.inductor
@pytest.mark.parametrize("precision", ["high"], indirect=True)
@pytest.mark.parametrize("factor", [0.98, 1.0])
def test_what_leans_more_than_tf32_does_is_wrong(precision, factor):
    """2% is past what autotuned products are allowed."""
    verdict = hotloop.verify(with_a_factor(factor), "inductor", search=False)
    assert verdict.compute_dtype == "tf32"
    assert verdict.passes == (factor == 1), str(verdict)


def with_a_factor(factor):
    """A program whose gradient is off by a factor where it is compiled."""
    made = workload()

    def scaled(_module, given):
        (x,) = given
        return (x + (factor - 1) * (x - x.detach()),) if torch.compiler.is_compiling() else given

    made.model.layer.register_forward_pre_hook(scaled)
    return made


@pytest.mark.inductor
def test_a_wrong_lowering_is_found_in_float32_and_named(monkeypatch):
    import torch._inductor.config
    import torch._inductor.decomposition as lowering

    backward = torch.ops.aten.gelu_backward.default
    right = lowering.decompositions[backward]
    torch.set_float32_matmul_precision("highest")
    with torch._inductor.config.patch(force_disable_caches=True):
        monkeypatch.setitem(
            lowering.decompositions,
            backward,
            lambda g, x, approximate="none": right(g, x, approximate=approximate) * 1.0001,
        )
        lowering.fast_random_decomps.cache_clear()
        # No preset that autotunes: without caches, each test of the search would time every product's kernels anew.
        verdict = hotloop.verify(workload(), "default")
        lowering.fast_random_decomps.cache_clear()
    assert not verdict.passes
    assert verdict.reference == "float64", verdict.reference_why
    assert [one.path for one in verdict.blamed.regions] == ["model.layer"]  # it calls F.gelu, no module


@pytest.mark.parametrize("tier", ["eager+graph", "aot_eager+graph"])
def test_a_recording_is_a_candidate_of_the_sentinel_and_training_goes_on(tier):
    program = workload(autocast=torch.bfloat16)
    loop = hotloop.Loop(program.model, program.optimizer, run=tier, sentinel=1.0, total_steps=100_000)
    step = loop.step(program.step)
    losses = []
    with hotloop.watch() as events:
        for _, batch in zip(range(5000), program.endless(), strict=False):
            losses.append(float(step(*batch).detach()))
            if len(losses) >= 200 and (found := loop.status().sentinels) and found[0].checks >= 2:
                break
    assert not [one for one in events if isinstance(one, ev.SentinelDisagreed | ev.TierDeclined)]
    assert loop.status().sentinels[0].checks >= 2
    assert losses[-1] < losses[0]
