"""Schedulers by name."""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from opdkit.engine.scheduling.contract import Scheduler
from opdkit.engine.scheduling.math_tips import MathTips
from opdkit.engine.scheduling.single_turn import SingleTurn
from opdkit.engine.scheduling.thinking_tips import ThinkingTips
from opdkit.protocols.config_wording import shown
from opdkit.protocols.errors import ConfigError

SCHEDULERS: dict[str, type[Scheduler]] = {
    "math_tips": MathTips,
    "single_turn": SingleTurn,
    "thinking_tips": ThinkingTips,
}


def make_scheduler(name: str, options: Mapping[str, Any]) -> Scheduler:
    """Build the scheduler that ``rollout.scheduler`` names.

    Raises:
        ConfigError: no scheduler has this name, or it has no such option, with the nearest one; or
            the scheduler does not take an option's value.
    """
    if name not in SCHEDULERS:
        raise ConfigError(f"rollout.scheduler is {name!r}, {_instead(name, SCHEDULERS)}")
    scheduler = SCHEDULERS[name]
    known = inspect.signature(scheduler).parameters
    for option in options:
        if option not in known:
            raise ConfigError(
                f"rollout.scheduler_options.{option} is no option of {name!r}, "
                f"{_instead(str(option), known)}"
            )
    try:
        return scheduler(**options)
    except TypeError as problem:
        raise ConfigError(
            f"rollout.scheduler_options is {shown(dict(options))}, but {name!r} does not take it: "
            f"{problem}"
        ) from None


def _instead(word: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, known, n=1)
    if nearest:
        return f"did you mean {nearest[0]!r}?"
    return f"known are: {', '.join(sorted(known)) or 'none'}"
