"""The ledger's two accounts, of samples and of tokens, as metrics show them."""

from opdkit.protocols.messages import Message


class Balance(Message, frozen=True, kw_only=True):
    """The two accounts. Anything missing, of either sign, is a bug."""

    num_drawn: int
    num_alive: int
    """Rolling, queued or leased."""
    num_trained: int
    num_dead: int
    num_generated_tokens: int
    num_trained_tokens: int
    num_in_flight_tokens: int
    """Of rolling, queued and leased samples."""
    num_dead_tokens: int
    """Of dead samples, and of failed attempts at others."""

    @property
    def num_missing(self) -> int:
        """Samples drawn that are nowhere."""
        return self.num_drawn - self.num_alive - self.num_trained - self.num_dead

    @property
    def num_missing_tokens(self) -> int:
        """Tokens generated that are nowhere."""
        num_known = self.num_trained_tokens + self.num_in_flight_tokens + self.num_dead_tokens
        return self.num_generated_tokens - num_known
