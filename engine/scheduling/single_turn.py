"""One reply to each prompt."""

from opdkit.engine.scheduling.contract import Scheduler


class SingleTurn(Scheduler):
    """Ends every trajectory after its first turn."""

    max_turns = 1
