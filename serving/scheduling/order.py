"""DeadlineOrder: tickets sorted by deadline, ties by arrival, with the tokens ahead of any deadline.

A list of short sorted blocks. Against a heap it removes exactly (no dead entries), answers "how many tokens are
due before this?", which admission asks of every request, and drops whole blocks when much expires at once.
"""

from bisect import bisect_left
from collections.abc import Iterator

from serving.scheduling.ticket import Ticket

BLOCK = 256
"""Entries of one block. At 100,000 tickets this balances moves inside a block against sums over blocks."""

_Key = tuple[float, int]


class DeadlineOrder:
    """Every operation costs O(block + number of blocks) at worst, all of it in C."""

    def __init__(self) -> None:
        self._keys: list[list[_Key]] = []
        self._tickets: list[list[Ticket]] = []
        self._last: list[_Key] = []
        self._tokens: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Ticket]:
        for block in self._tickets:
            yield from block

    @property
    def first(self) -> Ticket | None:
        """The earliest deadline."""
        return self._tickets[0][0] if self._tickets else None

    def add(self, ticket: Ticket) -> None:
        """`ticket.sequence` must be unique."""
        key = (ticket.deadline, ticket.sequence)
        self._length += 1
        if not self._last or (key > self._last[-1] and len(self._keys[-1]) >= BLOCK):
            self._insert_block(len(self._last), [key], [ticket])
            return
        index = min(bisect_left(self._last, key), len(self._last) - 1)
        keys, tickets = self._keys[index], self._tickets[index]
        place = bisect_left(keys, key)
        keys.insert(place, key)
        tickets.insert(place, ticket)
        self._tokens[index] += ticket.tokens
        self._last[index] = keys[-1]
        if len(keys) > BLOCK:
            half = len(keys) // 2
            upper_keys, upper_tickets = keys[half:], tickets[half:]
            del keys[half:], tickets[half:]
            self._tokens[index] -= sum(t.tokens for t in upper_tickets)
            self._last[index] = keys[-1]
            self._insert_block(index + 1, upper_keys, upper_tickets)

    def remove(self, ticket: Ticket) -> bool:
        """False if it is not here."""
        key = (ticket.deadline, ticket.sequence)
        index = bisect_left(self._last, key)
        if index == len(self._last):
            return False
        keys, tickets = self._keys[index], self._tickets[index]
        place = bisect_left(keys, key)
        if place == len(keys) or tickets[place] is not ticket:
            return False
        del keys[place], tickets[place]
        self._length -= 1
        if keys:
            self._tokens[index] -= ticket.tokens
            self._last[index] = keys[-1]
        else:
            self._delete_blocks(index, index + 1)
        return True

    def remove_due(self, now: float) -> list[Ticket]:
        """All whose deadline is not after `now`, in order."""
        whole = bisect_left(self._last, (now, _AFTER_ALL))
        due = [ticket for block in self._tickets[:whole] for ticket in block]
        self._delete_blocks(0, whole)
        if self._keys:
            part = bisect_left(self._keys[0], (now, _AFTER_ALL))
            if part:
                gone = self._tickets[0][:part]
                del self._keys[0][:part], self._tickets[0][:part]
                self._tokens[0] -= sum(t.tokens for t in gone)
                due += gone
        self._length -= len(due)
        return due

    def tokens_before(self, deadline: float) -> int:
        """Tokens of the tickets whose deadline is not after `deadline`: those ahead of a newcomer."""
        key = (deadline, _AFTER_ALL)
        index = bisect_left(self._last, key)
        tokens = sum(self._tokens[:index])
        if index < len(self._keys):
            place = bisect_left(self._keys[index], key)
            tokens += sum([ticket.tokens for ticket in self._tickets[index][:place]])
        return tokens

    def _insert_block(self, index: int, keys: list[_Key], tickets: list[Ticket]) -> None:
        self._keys.insert(index, keys)
        self._tickets.insert(index, tickets)
        self._last.insert(index, keys[-1])
        self._tokens.insert(index, sum(t.tokens for t in tickets))

    def _delete_blocks(self, start: int, end: int) -> None:
        for parallel in (self._keys, self._tickets, self._last, self._tokens):
            del parallel[start:end]


_AFTER_ALL = 1 << 62
"""Above every sequence number."""
