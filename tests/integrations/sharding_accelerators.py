"""Accelerate shards a model for accelerators alone: on the CPU it is told that each process has one."""

import contextlib

from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from captured_ranks import DEVICE


@contextlib.contextmanager
def as_accelerators():
    """Have the Accelerator of the block shard as it is told: its device stays what it is, and earlier ones are forgotten."""
    AcceleratorState._reset_state()
    if DEVICE == "cpu":
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_XPU
    else:
        PartialState().distributed_type = DistributedType.MULTI_GPU  # an earlier one that sharded left FSDP here
    yield
