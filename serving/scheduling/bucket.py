"""TokenBucket: the pending prompt tokens of one lane, against the threshold of one micro-batch."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Fills while there is no credit. The threshold bounds a batch and never delays one.

    `threshold` and `pending` are prompt tokens.
    """

    threshold: int
    pending: int = 0

    def add(self, tokens: int) -> None:
        """A request of so many tokens waits."""
        self.pending += tokens

    def take(self, tokens: int) -> None:
        """It waits no more.

        Raises:
            ValueError: more is taken than is pending: a defect in the caller.
        """
        if tokens > self.pending:
            raise ValueError(f"tokens is {tokens}, expected at most the {self.pending} that are pending")
        self.pending -= tokens

    @property
    def level(self) -> int:
        """Pending tokens up to the threshold: what the next batch would carry."""
        return min(self.pending, self.threshold)

    def fits(self, batch: int, tokens: int) -> bool:
        """Whether `tokens` more go into a batch that has `batch`. The first always does: a larger one goes alone."""
        return batch == 0 or batch + tokens <= self.threshold
