"""How prompt tokens follow from what can be counted: so many per unit of text, and so many per message.

A least-squares fit over the engine's own counts, of the *relative* error so that short prompts teach as much as long
ones, in which old answers fade. A prior stands for the first answers and keeps the fit defined where all prompts look
alike. Solved in closed form: two unknowns, five sums.
"""

DECAY = 0.98
"""Weight of the past at each lesson: about the last 50 answers count."""
FIRST_PER_MESSAGE = 4.0
"""Tokens of a chat template per message, role and separators, until answers have taught better."""
PER_MESSAGE_WEIGHT = 1e-5
"""The prior for the template weighs as much as one answer to a message of 300 tokens: where all prompts look alike, a
surprise in short ones is put down to the template, and one in long ones to the text."""
MOST_PER_MESSAGE = 4096.0
"""A template with a long built-in system prompt; more is an engine that reports nonsense."""


class PromptFit:
    """tokens ≈ `per_unit` · units + `per_message` · messages."""

    def __init__(self, first_per_unit: float, weight: float, bounds: tuple[float, float]) -> None:
        """The prior for `per_unit`, its weight (in units² of (units per token)²), and bounds that are never left."""
        self._first = first_per_unit
        self._weight = weight
        self._bounds = bounds
        self._uu = self._um = self._mm = self._uy = self._my = 0.0
        self.per_unit = first_per_unit
        self.per_message = FIRST_PER_MESSAGE

    def tokens(self, units: float, messages: int) -> float:
        """The estimate."""
        return self.per_unit * units + self.per_message * messages

    def learn(self, units: float, messages: int, actual: int) -> None:
        """The engine counted `actual` tokens. What no tokenizer can have counted is not learned from."""
        low, high = self._bounds
        if actual <= 0 or not units * low / 4 <= actual <= units * high + messages * MOST_PER_MESSAGE + 1:
            return
        u, m = units / actual, messages / actual
        self._uu = self._uu * DECAY + u * u
        self._um = self._um * DECAY + u * m
        self._mm = self._mm * DECAY + m * m
        self._uy = self._uy * DECAY + u
        self._my = self._my * DECAY + m
        uu, um, mm = self._uu + self._weight, self._um, self._mm + PER_MESSAGE_WEIGHT
        uy, my = self._uy + self._weight * self._first, self._my + PER_MESSAGE_WEIGHT * FIRST_PER_MESSAGE
        # um² < uu · mm by Cauchy-Schwarz, and the prior's weights are above 0: the determinant is positive.
        determinant = uu * mm - um * um
        self.per_unit = min(high, max(low, (uy * mm - my * um) / determinant))
        self.per_message = min(MOST_PER_MESSAGE, max(0.0, (my - um * self.per_unit) / mm))
