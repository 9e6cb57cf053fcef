"""Arguments and settings of libraries that spare a value which the library reads on the host; no torch."""

from __future__ import annotations

import linecache
import re
from typing import NamedTuple


class Switch(NamedTuple):
    """One read of a library's: where it is, and what spares it.

    ``file`` is a part of the path, with or without the name of a file. ``codes`` are parts of the lines that read.
    """

    file: str
    codes: tuple[str, ...]
    words: str


SWITCHES = (
    # -- torch
    Switch(
        "torch/distributions/",
        ("_is_all_true(valid)",),
        "the distribution checks its arguments: pass validate_args=False to it, or call "
        "torch.distributions.Distribution.set_default_validate_args(False) once",
    ),
    Switch(
        "torch/nn/modules/transformer.py",
        ("(mask == causal_comparison).all()",),
        "torch compares the mask with a causal one: say what it is, by is_causal= of nn.TransformerEncoder, "
        "tgt_is_causal= of nn.TransformerDecoder, src_is_causal= and tgt_is_causal= of nn.Transformer",
    ),
    Switch(
        "torch/nn/utils/clip_grad.py",
        ("error_if_nonfinite and ",),
        "pass error_if_nonfinite=False",
    ),
    Switch(
        "torch/nn/modules/rnn.py",
        ("batch_sizes[0]", "h_zeros = torch.zeros("),
        "packed sequences keep their lengths on the host: hand the RNN the padded batch, pick each row's last output "
        "with torch.gather, and leave padding out of the loss",
    ),
    Switch(
        "torch/nn/modules/batchnorm.py",
        ("float(self.num_batches_tracked)",),
        "momentum=None divides by a count that is read on the host: give momentum a number (0.1)",
    ),
    Switch(
        "torch/nn/modules/adaptive.py",
        ("target_mask.nonzero()", "used_rows != batch_size"),
        "AdaptiveLogSoftmaxWithLoss sorts its targets on the host, and nothing spares that: use nn.Linear and "
        "F.cross_entropy",
    ),
    Switch(
        "torch/nn/functional.py",
        ("torch.any(var < 0)",),
        "gaussian_nll_loss looks for negative variances: write it out, "
        "0.5 * (var.log() + (input - target) ** 2 / var) with var.clamp(min=eps)",
    ),
    Switch(
        "torch/optim/swa_utils.py",
        ("self.n_averaged == 0", "self.n_averaged > 0"),
        "give the loop the average, which then knows that it has begun: hotloop.Loop(model, optimizer, state=average)",
    ),
    Switch(
        "torch/optim/swa_utils.py",
        ("torch._foreach_lerp_(", "1 / (num_averaged + 1)"),
        "parameters of 16 bits are weighed with a number of the host's: pass "
        "avg_fn=torch.optim.swa_utils.get_swa_avg_fn() to AveragedModel, which divides on the device",
    ),
    # -- ema-pytorch
    Switch(
        "ema_pytorch/",
        ("step.item()", "initted.item()"),
        "this average counts on the host: call ema.update() after the step, outside of it",
    ),
    # -- transformers
    Switch(
        "transformers/models/",
        ("dropout_probability < self", "not skip_the_layer"),
        "layer drop chooses on the host which layers to skip: set layerdrop=0.0 in the model's config, or "
        "encoder_layerdrop and decoder_layerdrop (before transformers 5.23 such a layer reads all the same)",
    ),
    Switch(
        "transformers/models/deberta",
        ("(labels >= 0).nonzero()",),
        "the loss looks for rows that have a label: compute it outside of the model, "
        "F.cross_entropy(model(input_ids, attention_mask).logits, labels)",
    ),
    Switch(
        "transformers/models/",
        ("labels.max() >= self.config.vocab_size",),
        'losses of CTC read labels and lengths on the host, and nothing spares that: run="regional" compiles the '
        "blocks of the model",
    ),
    Switch(
        "transformers/models/",
        (".detach().sum(-1).tolist()",),
        "SpecAugment draws its masks on the host: set apply_spec_augment=False in the model's config, or mask the "
        "input before the step",
    ),
    Switch(
        "transformers/models/",
        (", 0).nonzero()", "expert_mask = torch.nn.functional.one_hot("),
        'the experts run one by one, as the host finds them: experts_implementation="batched_mm" or "grouped_mm" in '
        "from_pretrained or the config",
    ),
    Switch(
        "transformers/models/",
        ("== torch.float16 and ",),
        "only float16 is looked through for infinities: load the model in bfloat16 or float32 (dtype=torch.bfloat16)",
    ),
    Switch(
        "transformers/models/",
        ("if not torch.isfinite(hidden_states).all()",),
        "models that find boxes look for infinities, and match boxes, on the host, and nothing spares that: "
        'run="regional" compiles their blocks',
    ),
    Switch(
        "transformers/loss/",
        ("cost_matrix.view(batch_size, num_queries, -1).cpu()",),
        'boxes are matched on the host, and nothing spares that: run="regional" compiles the blocks of the model',
    ),
    Switch(
        "transformers/modeling_flash_attention_utils.py",
        (".max().item()", "torch.nonzero(attention_mask"),
        'attention without padding reads the lengths on the host: attn_implementation="sdpa" in from_pretrained',
    ),
    Switch(
        "transformers/masking_utils.py",
        ("attention_mask.all()",),
        'the mask is looked through for padding on the host: attn_implementation="sdpa" in from_pretrained, or no '
        "attention_mask where nothing is padded",
    ),
    # -- diffusers
    Switch(
        "diffusers/models/attention_dispatch.py",
        ("seqlens_k.max().item()", ".nonzero(as_tuple=False)"),
        'this attention reads the lengths on the host: model.set_attention_backend("native")',
    ),
    Switch(
        "diffusers/schedulers/",
        (".nonzero()", ".item()"),
        "this scheduler looks its timesteps up on the host: DDPMScheduler.add_noise takes them on the device; or add "
        "the noise before the step",
    ),
    # -- peft
    Switch(
        "peft/tuners/adalora/",
        (".item()", ".tolist()"),
        "AdaLoRA gives ranks out anew on the host: call update_and_allocate(step) after the step, outside of it",
    ),
    # -- sentence-transformers
    Switch(
        "losses/online_contrastive.py",
        ("distance_matrix[labels ==", "negs[negs <", "poss[poss >"),
        "the hard pairs are as many as the data has: ContrastiveLoss takes all pairs",
    ),
    Switch(
        "losses/batch_all_triplet.py",
        (".nonzero(",),
        "the triplets are as many as the labels make: BatchHardTripletLoss takes one for each row",
    ),
    Switch(
        "sentence_transformer/modules/pooling.py",
        ("pl[0].item()",),
        "the length of the prompt is read on the host: Pooling(include_prompt=True)",
    ),
    # -- torchvision, torchmetrics
    Switch(
        "torchvision/models/detection/",
        ("degenerate_boxes.any()", "torch.where("),
        'detectors choose boxes on the host, as many as the data has, and nothing spares that: run="regional" or '
        '"full" compiles the backbone',
    ),
    Switch(
        "torchvision/transforms/",
        (".item()", "torch.rand(1)"),
        "the transform draws on the host: apply it in the data loader, or before the step",
    ),
    Switch(
        "torchmetrics/functional/",
        ("torch.unique(",),
        "the metric checks its arguments: pass validate_args=False to it, or compute it outside of the step",
    ),
)
"""What the most used libraries read on the host in a training step, each with what spares it."""
_PLACE = re.compile(r"(\S+\.py):(\d+)")


def switch_for(file: str, source: str) -> str:
    """Return what spares the value that a line of a file reads; empty where nothing is known.

    A line that cannot be found is taken for one that reads.
    """
    file = file.replace("\\", "/")
    for switch in SWITCHES:
        if switch.file in file and (not source or any(code in source for code in switch.codes)):
            return switch.words
    return ""


def switch_at(text: str) -> str:
    """Return what spares the value that is read at a place which a text names; empty where nothing is known.

    Files of torch are named without their folder; `linecache` looks for them on Python's path.
    """
    found = (switch_for(file, linecache.getline(file, int(line))) for file, line in _PLACE.findall(text))
    return next(filter(None, found), "")
