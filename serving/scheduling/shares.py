"""Token deficit round robin between lanes: who is next, in proportion to weights, with a bound on starvation.

Every lane has an account. A round gives each backlogged lane `quantum × weight` tokens; what it releases is charged.
A lane's head goes when its account covers the head's first turn (`min(cost, turn)`); the rest of a larger one is owed
and paid from the following rounds, turn by turn, in which the other lanes get theirs. When a lane runs empty it keeps
its debt, and of its allowance one round's, so that its next request need not wait for a round to end.

After Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round-Robin" (1995), with the lanes of a round
served in the spec's order and empty rounds skipped by one division.
"""

from collections.abc import Mapping, Set


class DeficitRoundRobin:
    """The accounts of all lanes, in tokens.

    Args:
        weights: lane → weight, in the order that breaks ties.
        quantum: tokens of weight 1 in one round.
        turn: tokens that must be covered before a lane's head goes.
    """

    def __init__(self, weights: Mapping[str, int], quantum: int, turn: int) -> None:
        self._quantum = {lane: quantum * weight for lane, weight in weights.items()}
        self._turn = turn
        self._deficit = dict(self._quantum)

    def deficit(self, lane: str) -> int:
        """Tokens that the lane may release in this round; below 0 it owes."""
        return self._deficit[lane]

    def may_jump(self, lane: str) -> bool:
        """An overdue head may go before its turn if the lane owes nothing: one overdraft at a time."""
        return self._deficit[lane] >= 0

    def pick(self, waiting: Mapping[str, int], able: Set[str], held: Set[str] = frozenset()) -> str | None:
        """The lane whose head goes next; None if none can.

        Args:
            waiting: backlogged lane → cost of its head, tokens.
            able: lanes whose head a replica could take now.
            held: lanes whose head waits for a seat while every replica is busy with a large prompt. When it is their
                turn, the round does not go on without them, or their share would leak to whoever needs no seat.
        """
        while able:
            turn_of_held = False
            rounds = None
            for lane, deficit in self._deficit.items():
                if lane not in able and lane not in held:
                    continue
                missing = min(waiting[lane], self._turn) - deficit
                if missing > 0:
                    needed = -(-missing // self._quantum[lane])
                    rounds = needed if rounds is None else min(rounds, needed)
                elif lane in able:
                    return lane
                else:
                    turn_of_held = True
            if rounds is None or turn_of_held:
                return None
            self._advance(rounds, waiting)
        return None

    def charge(self, lane: str, tokens: int) -> None:
        """The lane released so many tokens."""
        self._deficit[lane] -= tokens

    def rest(self, lane: str) -> None:
        """The lane's queue is empty: what it has above one round's allowance lapses, what it owes stays."""
        self._deficit[lane] = min(self._deficit[lane], self._quantum[lane])

    def _advance(self, rounds: int, waiting: Mapping[str, int]) -> None:
        for lane, deficit in self._deficit.items():
            quantum = self._quantum[lane]
            cap = quantum + self._turn if lane in waiting else quantum
            self._deficit[lane] = max(deficit, min(deficit + rounds * quantum, cap))


def starvation_bound_tokens(
    lane: str, weights: Mapping[str, int], quantum: int, turn: int, largest: Mapping[str, int]
) -> int:
    """Most tokens of other lanes between two releases of `lane`, while it is backlogged and a replica could take its
    head (deadline order inside the lane is its own affair).

    `largest` is each lane's largest single release (the larger of batch threshold and longest prompt), tokens.

    Derivation. Write Q for a lane's quantum × weight, C for its largest release.
    1. Accounts stay within [−C, turn + Q]: a lane goes by turn with at least min(cost, turn) or jumps with at least 0,
       so one release leaves it at −C or above, and it cannot go again below 0; `_advance` stops at turn + Q.
    2. So `lane` reaches what its head must have, at most `turn`, within R = ⌈(turn + C) / Q⌉ rounds, and no round
       begins while it has it.
    3. Another lane is granted R·Q' in them, had at most turn + Q' before and has at least −C' after, jumps included,
       since they are charged too: it releases at most turn + (R + 1)·Q' + C'.
    The bound is the sum of 3 over the other lanes.
    """
    own = quantum * weights[lane]
    rounds = -(-(turn + largest[lane]) // own)
    return sum(
        turn + (rounds + 1) * quantum * weight + largest[other] for other, weight in weights.items() if other != lane
    )
