"""FSDP2: parameters of which each process holds a shard, and what `fully_shard` keeps for itself between two steps.

Between two steps a sharded model is at rest: each module holds its shards, and nothing of a forward or a backward is
kept. Whole parameters are temporary. They have memory of their own while a step needs them, and none between two steps.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SWITCHES = (
    *("reduce_grads", "all_reduce_grads", "reshard_after_backward", "unshard_in_backward", "_all_reduce_hook"),
    *("gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_scatter_unused_params"),
)
"""Attributes of a group that a program may set at any time, a step too."""


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor that is spread over processes; any other tensor itself."""
    if type(tensor) in _PLAIN:
        return tensor
    shard: torch.Tensor = tensor._local_tensor if is_spread(tensor) else tensor  # type: ignore[attr-defined]  # noqa: SLF001 - in the ledger
    return shard


def is_spread(tensor: Any) -> bool:
    """Return whether a value is a tensor that is spread over processes (a DTensor)."""
    known = sys.modules.get("torch.distributed.tensor")  # whoever shards has imported it; the import takes a second
    return known is not None and isinstance(tensor, known.DTensor)


def is_sharded(module: torch.nn.Module) -> bool:
    """Return whether `fully_shard` was called with a module."""
    known = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(known, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


class Sharded:
    """What `fully_shard` made of some models; nothing where it was not called.

    Args:
        models: the models.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        found: dict[int, Any] = {}
        for module in (module for model in models for module in model.modules() if is_sharded(module)):
            sharded: Any = module
            state = sharded._get_fsdp_state()  # noqa: SLF001 - in the ledger
            found[id(state)] = state
        self._states = list(found.values())
        self._groups = [group for state in self._states for group in _groups_of(state)]

    def __bool__(self) -> bool:
        return bool(self._groups)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is one that `fully_shard` has sharded."""
        return any(one.sharded_param is parameter for group in self._groups for one in group.fsdp_params)

    def knows(self, module: torch.nn.Module) -> bool:
        """Return whether a module that `fully_shard` was called with is one of these models'."""
        asked: Any = module
        return any(asked._get_fsdp_state() is state for state in self._states)  # noqa: SLF001 - in the ledger

    def why_never_recorded(self) -> str:
        """Say why no step of these models can be recorded; empty where one can. Looked at once."""
        return next(filter(None, map(_why_never_recorded, self._groups)), "")

    def why_not_recorded(self) -> str:
        """Say why no call can be recorded, replayed or run twice from now on, by what a program may set or keep."""
        for group in self._groups:
            if why := _why_other_collectives(group) or _why_kept(group):
                return why
        for state in self._states:
            if not state._state_ctx.is_last_backward:  # noqa: SLF001 - in the ledger
                return "set_is_last_backward(False) keeps state of a backward between two calls"
            if state._state_ctx.post_optim_event is not None:  # noqa: SLF001 - in the ledger
                return "set_post_optim_event() has the next forward wait for an event from outside of the step"
        return ""

    def has_run(self) -> bool:
        """Return whether all models have run forward before."""
        return all(state._is_root is not None for state in self._states)  # noqa: SLF001 - in the ledger

    def settings(self) -> tuple[Any, ...]:
        """Return what a program may set at any time and a recording freezes."""
        return tuple(
            (
                group.reduce_grads,
                group.all_reduce_grads,
                group.gradient_divide_factor,
                group.force_sum_reduction_for_comms,
                group.unshard_in_backward,
                getattr(group, "reduce_scatter_unused_params", False),
                group._reshard_after_forward,  # noqa: SLF001 - in the ledger
            )
            for group in self._groups
        )

    def is_temporary(self, address: int) -> bool:
        """Return whether memory is that of a whole parameter, or of all that a group has gathered."""
        return any(
            tensor.untyped_storage().data_ptr() == address
            for group in self._groups
            for one in group.fsdp_params
            for tensor in getattr(one, "all_gather_outputs", ())
        )

    def rest(self) -> None:
        """Bring the models to rest: after an evaluation, which leaves whole parameters, or a step that ended half-way.

        What a program has begun to gather by ``unshard()`` is waited for, and gathered again by the next forward. What
        a step that ended half-way has computed is lost; the caller has waited for the device. Nothing of that is waited
        for here, since events that a failed capture has recorded must not be.
        """
        if any(map(_amid, self._groups)) or any(map(_stuck, self._states)):
            for state in self._states:
                if state._is_root is not None:  # noqa: SLF001 - in the ledger; None before its first forward
                    _begin_anew(state)
        for group in self._groups:
            if group._all_gather_result is not None:  # noqa: SLF001 - in the ledger
                group.wait_for_unshard()
            if not group.is_sharded and group.reshard_after_backward:  # else a program keeps it whole
                group._reshard_after_forward_event = None  # noqa: SLF001 - in the ledger
                group._to_sharded()  # noqa: SLF001 - in the ledger

    def switches(self) -> list[dict[str, Any]]:
        """Return what a program has set, by group."""
        return [{name: getattr(group, name) for name in _SWITCHES if hasattr(group, name)} for group in self._groups]

    def undo(self, switches: list[dict[str, Any]]) -> None:
        """Undo a run that began where `why_not_recorded` found nothing; it may have set switches, or kept gradients."""
        for group, found in zip(self._groups, switches, strict=True):
            vars(group).update(found)
            _drop_whole_gradients(group)
        for state in self._states:
            state._state_ctx.is_last_backward = True  # noqa: SLF001 - in the ledger
        self.rest()


def _groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters that a state gathers together: one before torch 2.12."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)  # noqa: SLF001 - in the ledger
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # noqa: SLF001 - in the ledger


def _why_never_recorded(group: Any) -> str:
    """Say why no step can be recorded that gathers a group; empty where one can."""
    extended = any(hasattr(shard_of(one.sharded_param), "fsdp_pre_all_gather") for one in group.fsdp_params)
    reasons = (
        (
            type(group.mesh_info).__name__ != "FSDPMeshInfo",
            "fully_shard(mesh=...) of two dimensions (HSDP), or replicate(), reduces over more than one group",
        ),
        (
            type(group.offload_policy).__name__ != "OffloadPolicy",
            "fully_shard(offload_policy=CPUOffloadPolicy()) keeps parameters on the host",
        ),
        (
            any(one.is_dtensor for one in group.fsdp_params),
            "parameters are split by tensor parallelism as well",
        ),
        (extended, "a tensor class of its own (float8) says how parameters are gathered"),
    )
    return next((why for holds, why in reasons if holds), "") or _why_other_collectives(group)


def _why_other_collectives(group: Any) -> str:
    """Say what stands in for FSDP2's own collectives; empty where nothing does. A program may set it at any time."""
    if group._all_reduce_hook is not None:  # noqa: SLF001 - in the ledger
        return "set_all_reduce_hook() has set a hook, whose own state no undo and no recording knows"
    ways = (group._all_gather_comm, group._reduce_scatter_comm)  # noqa: SLF001 - in the ledger
    if not all(type(way).__name__.startswith("Default") for way in ways):
        return "collectives of one's own (set_custom_all_gather, symmetric memory) are not known to be recorded"
    return ""


def _why_kept(group: Any) -> str:
    """Say what a group keeps, or will keep, from one call for another; empty where it keeps nothing."""
    if any(map(_keeps_whole_gradient, group.fsdp_params)):
        return (
            "set_requires_gradient_sync(False), which no_sync() and no_backward_sync() call, has kept whole gradients "
            "of an earlier call, which nothing but FSDP2 knows of"
        )
    if not group.reshard_after_backward:
        return "set_reshard_after_backward(False) keeps whole parameters between calls"
    return ""


def _keeps_whole_gradient(one: Any) -> bool:
    """Return whether a parameter has a gradient that is not reduced yet."""
    if getattr(one, "unsharded_accumulated_grad", None) is not None:  # before torch 2.15
        return True
    whole = vars(one).get("_unsharded_param")
    return whole is not None and whole.grad is not None


def _amid(group: Any) -> bool:
    """Return whether a group is within a forward or a backward."""
    return bool(group._training_state.name != "IDLE")  # noqa: SLF001 - in the ledger


def _stuck(state: Any) -> bool:
    """Return whether a model is within a forward or a backward."""
    shared = state._state_ctx  # noqa: SLF001 - in the ledger
    return shared.iter_forward_root is not None or shared.post_backward_final_callback_queued


def _begin_anew(state: Any) -> None:
    """Forget what a forward or a backward that ended half-way has left in a state and its groups."""
    shared, streams = state._state_ctx, state._comm_ctx  # noqa: SLF001 - in the ledger
    shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False
    streams.post_forward_order.clear()
    streams.all_gather_state = None
    if hasattr(streams, "reduce_scatter_state"):  # before torch 2.13
        streams.reduce_scatter_state = None
    for kept in ("reduce_scatter_states", "_last_post_reduce_events"):
        getattr(streams, kept, []).clear()
    state._modules_to_run_forward.clear()  # noqa: SLF001 - in the ledger
    for group in _groups_of(state):
        idle = type(group._training_state).IDLE  # noqa: SLF001 - in the ledger
        group._training_state = state._training_state = idle  # noqa: SLF001 - in the ledger
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None  # noqa: SLF001 - in the ledger
        group._partial_reduce_output = None  # noqa: SLF001 - in the ledger
        group._post_forward_indices.clear()  # noqa: SLF001 - in the ledger
        _drop_whole_gradients(group)


def _drop_whole_gradients(group: Any) -> None:
    """Forget the gradients of a group that are not reduced yet."""
    for one in group.fsdp_params:
        if "unsharded_accumulated_grad" in vars(one):  # before torch 2.15
            one.unsharded_accumulated_grad = None
        if hasattr(one, "_unsharded_param"):
            one._unsharded_param.grad = None  # noqa: SLF001 - in the ledger
