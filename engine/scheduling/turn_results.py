"""What hooks returned, checked: from here on their mappings have types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opdkit.engine.scheduling.contract import RolloutOutput, RolloutRequest
from opdkit.protocols.errors import HookError

_BOOLS = (bool, np.bool_)  # a comparison of rewards often gives the latter


@dataclass(frozen=True, kw_only=True)
class TurnVerdict:
    """What ``on_turn_end`` said."""

    done: bool | None
    """None: no opinion."""
    rollout_infos: Mapping[str, Any]

    @classmethod
    def from_hook(cls, result: object) -> "TurnVerdict":
        """Check a result; None is no opinion and no infos.

        Raises:
            HookError: it is something else than the contract allows.
        """
        mapping = _mapping({} if result is None else result, "on_turn_end")
        done = mapping.get("done")
        if done is not None and not isinstance(done, _BOOLS):
            raise HookError(f"on_turn_end: done must be True, False or None, got {done!r}")
        done = None if done is None else bool(done)
        return cls(done=done, rollout_infos=_infos(mapping, "on_turn_end"))


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What ``step`` made of a turn."""

    infer_request: RolloutRequest
    response_token_ids: Sequence[int] | None
    response_loss_mask: Sequence[int] | None
    rollout_logprobs: Sequence[float] | None
    rollout_infos: Mapping[str, Any]

    @classmethod
    def from_hook(cls, result: object, *, request: RolloutRequest) -> "StepResult":
        """Check a result; without ``infer_request`` the trajectory goes on with ``request``.

        Raises:
            HookError: it is something else than the contract allows.
        """
        mapping = _mapping(result, "step")
        following = mapping.get("infer_request", request)
        if not isinstance(following, RolloutRequest) or not following.messages:
            raise HookError(f"step: infer_request must be a request with messages: {following!r}")
        token_ids = _list_or_none(mapping, "response_token_ids")
        if token_ids is not None and not token_ids:
            raise HookError("step: response_token_ids are empty; leave them out to keep the record")
        return cls(
            infer_request=following,
            response_token_ids=token_ids,
            response_loss_mask=_list_or_none(mapping, "response_loss_mask"),
            rollout_logprobs=_list_or_none(mapping, "rollout_logprobs"),
            rollout_infos=_infos(mapping, "step"),
        )

    @property
    def rewrites_reply(self) -> bool:
        """Whether anything replaces the engine's record of this reply."""
        parts = (self.response_token_ids, self.response_loss_mask, self.rollout_logprobs)
        return any(part is not None for part in parts)


def checked_finish(result: object) -> bool:
    """Return what ``check_finished`` said.

    Raises:
        HookError: it is no bool.
    """
    if not isinstance(result, _BOOLS):
        raise HookError(f"check_finished must return a bool, got {result!r}")
    return bool(result)


def checked_outputs(result: object) -> list[RolloutOutput]:
    """Return the outputs of ``run`` as a list.

    Raises:
        HookError: it returned something else, or nothing.
    """
    parts = result if isinstance(result, list | tuple) else [result]
    outputs = [part for part in parts if isinstance(part, RolloutOutput)]
    if not outputs or len(outputs) != len(parts):
        raise HookError(f"run must return a RolloutOutput or a list of them, got {result!r}")
    return outputs


def _mapping(value: object, hook: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise HookError(f"{hook} must return a mapping, got {type(value).__name__}")
    return value


def _infos(mapping: Mapping[str, Any], hook: str) -> Mapping[str, Any]:
    infos = mapping.get("rollout_infos")
    if infos is not None and not isinstance(infos, Mapping):
        raise HookError(f"{hook}: rollout_infos must be a mapping, got {type(infos).__name__}")
    return infos or {}


def _list_or_none(mapping: Mapping[str, Any], key: str) -> Sequence[Any] | None:
    value = mapping.get(key)
    if value is not None and not isinstance(value, list | tuple):
        raise HookError(f"step: {key} must be a list, got {type(value).__name__}")
    return value
