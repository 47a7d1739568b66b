"""What one trajectory has cost so far."""

from dataclasses import dataclass


@dataclass(kw_only=True, eq=False)
class Tally:
    """Tokens and waiting times of a trajectory, over its attempts."""

    num_sampled: int = 0
    """Tokens of the current attempt."""
    num_wasted: int = 0
    """Tokens of the attempts before."""
    generate_s: float = 0.0
    """Time that the current attempt waited for the student."""
    score_s: float = 0.0
    """Time that the current attempt waited for the teacher, summed over segments."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all attempts."""
        return self.num_sampled + self.num_wasted

    def start_attempt(self) -> None:
        """Write off the attempt before."""
        self.num_wasted += self.num_sampled
        self.num_sampled = 0
        self.generate_s = self.score_s = 0.0
