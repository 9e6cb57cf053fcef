"""What DistributedDataParallel keeps for itself: whether a recording can hold it, and how it begins anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

NEVER = 2**31 - 1


def why_not_recorded(wrapper: DistributedDataParallel) -> str:
    """Say why no recording can hold what a wrapper does in each forward and backward; empty where one can."""
    if wrapper.find_unused_parameters:
        return (
            "DistributedDataParallel(find_unused_parameters=True) looks for them anew in each step, on the host: make "
            "it with static_graph=True, or leave it out where every parameter is used"
        )
    if wrapper.mixed_precision is not None:
        return "DistributedDataParallel(mixed_precision=...) casts parameters on streams of its own: use torch.autocast"
    if joins(wrapper):
        return "Join([...]) asks on the host in each step whether all processes have batches"
    if wrapper._comm_hooks:  # noqa: SLF001 - in the ledger
        return "a communication hook may do something else after some steps, and a recording repeats what it did in one"
    if wrapper.static_graph and next(wrapper.parameters()).device.type == "cpu":
        return "DistributedDataParallel(static_graph=True) reads a table in host memory in each backward on the CPU"
    return ""


def joins(wrapper: DistributedDataParallel) -> bool:
    """Return whether a wrapper runs within `Join`, where processes call it as often as they have batches."""
    return bool(wrapper._join_config.enable)  # noqa: SLF001 - in the ledger


def why_not_at_first(wrapper: DistributedDataParallel) -> str:
    """Say what is found out once, as it takes longer."""
    return why_hooked(wrapper) or why_not_recorded(wrapper)


def why_hooked(wrapper: DistributedDataParallel) -> str:
    """Name a wrapper's communication hook; empty where it has none. Hooks of torch's own are known to its log alone."""
    told: Any = wrapper
    hook = told._get_ddp_logging_data().get("comm_hook")  # noqa: SLF001 - in the ledger
    return f"a communication hook ({hook}) is not recorded" if hook else ""


def stop_timing(wrapper: DistributedDataParallel) -> None:
    """Keep a wrapper from timing each hundredth step by events, which it would read later: a capture forbids that."""
    timed: Any = wrapper
    timed._set_ddp_runtime_logging_sample_rate(NEVER)  # noqa: SLF001 - in the ledger


def has_rebuilt(wrapper: DistributedDataParallel) -> bool:
    """Return whether a wrapper has rebuilt its buckets in the order in which gradients come, or never will."""
    asked: Any = wrapper
    never = asked.find_unused_parameters and not asked.static_graph
    return bool(never or asked._has_rebuilt_buckets)  # noqa: SLF001 - in the ledger


def reset_reducer(wrapper: DistributedDataParallel) -> None:
    """Let a wrapper begin anew after a backward that ended half-way: all processes have to, as it rebuilds buckets."""
    wrapper._has_rebuilt_buckets = False  # noqa: SLF001 - in the ledger
    wrapper.reducer._reset_state()  # noqa: SLF001 - in the ledger
