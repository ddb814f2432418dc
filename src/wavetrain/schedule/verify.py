"""The proof that a schedule is right, before any process exists; or the smallest reason why it is not.

Proven: every stage and microbatch has each action exactly once, on one rank; everything comes after what it needs; both
ends of each link agree on the order of messages; no rank waits in a circle, with channels that hold any number of
messages, one, or none; and no rank holds more activations than a cap allows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from wavetrain.base.errors import WavetrainError
from wavetrain.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Actions, Kind
from wavetrain.schedule.evaluate import Stuck, peak_in_flight
from wavetrain.schedule.passes import add_communication, message, receiver
from wavetrain.schedule.picture import around
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.prove import PLAIN, is_proven
from wavetrain.schedule.table import uncollected

MOST_REASONS = 20
SLACK = 64  # a gap this wide is still listed stage by stage
Place = tuple[int, int]  # rank, position in its row


class ScheduleError(WavetrainError):
    """A schedule that must not run: why, and the actions around the culprit."""

    exit_code = 5

    def __init__(self, reasons: list[str], actions: Actions, places: list[Place]) -> None:
        self.reasons = tuple(reasons)
        self.places = tuple(places)
        shown = list(reasons[:MOST_REASONS])
        if len(reasons) > MOST_REASONS:
            shown.append(f"and {len(reasons) - MOST_REASONS} more")
        super().__init__("\n".join([*shown, *around(actions, places)]))


@dataclass(frozen=True)
class Proof:
    """What was proven."""

    num_compute: int
    num_messages: int
    peak_in_flight: tuple[Fraction, ...]
    capacities: tuple[str, ...] = ("0", "1", "unbounded")


def verify(actions: Actions, *, cap: Fraction | None = None, microbatches: int | None = None) -> Proof:
    """Prove a schedule or raise a ScheduleError. Where it has no communication, the pass that adds it is proven too."""
    _check_numbers(actions)
    with uncollected():
        complete = actions if actions.has_communication else _with_communication(actions)
        others = any(action.kind not in PLAIN for row in actions.ranks for action in row)
        if others or not is_proven(complete, microbatches):
            _find_reason(actions, microbatches)
    peaks = peak_in_flight(actions)
    if cap is not None and max(peaks) > cap:
        raise _over_cap(actions, peaks, cap)
    num_compute = sum(action.kind in COMPUTE for row in actions.ranks for action in row)
    num_messages = sum(action.kind in SENDS for row in complete.ranks for action in row)
    return Proof(num_compute, num_messages, peaks)


def _check_numbers(actions: Actions) -> None:
    """Numbers far beyond what is there are refused before anything of their size is built."""
    computed = {stage for row in actions.ranks for stage, kind, _ in row if kind in COMPUTE}
    highest = max(computed, default=-1)
    forwards = sum(kind is Kind.F for row in actions.ranks for _, kind, _ in row)
    most_stage = highest if highest <= 2 * len(computed) + SLACK else len(computed) - 1
    most_microbatch = 2 * forwards + SLACK
    top_stage = max((stage for row in actions.ranks for stage, _, _ in row), default=-1)
    top_microbatch = max((m or 0 for row in actions.ranks for _, _, m in row), default=0)
    if top_stage <= most_stage and top_microbatch <= most_microbatch:
        return
    for rank, row in enumerate(actions.ranks):
        for at, (stage, _, m) in enumerate(row):
            if stage <= most_stage and (m or 0) <= most_microbatch:
                continue
            where = f"rank {rank} position {at}: {row[at]} names"
            if stage > highest:
                reason = f"{where} stage {stage}, which nobody computes"
            elif stage > most_stage:
                missing = next(number for number in range(len(computed) + 1) if number not in computed)
                reason = f"{where} stage {stage}, but stage {missing} has no forward"
            else:
                reason = f"{where} microbatch {m}, but there are only {forwards} forwards"
            raise ScheduleError([reason], actions, [(rank, at)])


def _over_cap(actions: Actions, peaks: tuple[Fraction, ...], cap: Fraction) -> ScheduleError:
    """The forward with which a rank first holds too much."""
    rank = next(rank for rank, peak in enumerate(peaks) if peak > cap)
    row, chunks = actions.ranks[rank], actions.placement.chunks(rank)
    changes = [(a.kind is Kind.F) - (a.kind in (Kind.B, Kind.W)) for a in row]
    at = next(at for at, live in enumerate(accumulate(changes)) if live > cap * chunks)
    reason = f"rank {rank} position {at}: {row[at]} takes it over the cap of {cap} microbatches of activations"
    return ScheduleError([f"{reason}; it holds {peaks[rank]} at most"], actions, [(rank, at)])


def _with_communication(actions: Actions) -> Actions:
    """The schedule with messages placed, or as it is where it gets stuck: the reason is found later."""
    try:
        return add_communication(_bare(actions))
    except (Stuck, IndexError):  # incomplete in some way
        return actions


def _find_reason(actions: Actions, microbatches: int | None) -> None:
    """Raise what is wrong with a schedule; return if nothing is (it may have kinds the fast proof leaves out)."""
    checker = _Checker(actions)
    checker.check_stages()
    checker.raise_reasons()
    checker.check_complete(microbatches)
    checker.raise_reasons()
    checker.check_local_order()
    checker.raise_reasons()
    if not actions.has_communication:
        try:
            actions = add_communication(_bare(actions))
        except Stuck as stuck:
            raise _circle_of_actions(actions, stuck) from None
        checker = _Checker(actions)
    checker.check_messages()
    checker.raise_reasons()
    checker.check_links()
    checker.raise_reasons()
    _check_no_circle(actions)


def _bare(actions: Actions) -> Actions:
    """Compute actions alone: what communication is placed between."""
    return Actions(tuple(tuple(action for action in row if action.kind in COMPUTE) for row in actions.ranks))


class _Checker:
    """Collects reasons against a schedule; holds where every action stands."""

    def __init__(self, actions: Actions) -> None:
        self.actions = actions
        self.placement: Placement = actions.placement
        self.places: dict[Action, list[Place]] = defaultdict(list)
        for rank, row in enumerate(actions.ranks):
            for at, action in enumerate(row):
                self.places[action].append((rank, at))
        self.reasons: list[str] = []
        self.culprits: list[Place] = []

    def blame(self, reason: str, *places: Place) -> None:
        self.reasons.append(reason)
        self.culprits += places

    def raise_reasons(self) -> None:
        if self.reasons:
            raise ScheduleError(self.reasons, self.actions, self.culprits)

    def where(self, action: Action) -> str:
        places = self.places.get(action)
        return f"rank {places[0][0]} position {places[0][1]}" if places else "nowhere"

    # --- single checks ---

    def check_stages(self) -> None:
        """Every stage is there, and one rank has all of it."""
        first: dict[int, tuple[Action, Place]] = {}
        for action, places in self.places.items():
            for place in places:
                other, there = first.setdefault(action.stage, (action, place))
                if there[0] != place[0]:
                    mine, theirs = f"rank {place[0]} position {place[1]}", f"rank {there[0]} position {there[1]}"
                    self.blame(f"stage {action.stage} is on two ranks: {other} {theirs}, {action} {mine}", there, place)
                    break
        computed = self.actions.microbatches
        missing = [stage for stage in range(self.placement.num_stages) if stage not in computed]
        for stage in missing:
            others = [m for (other, _, m) in self.places if other == stage and m is not None]
            self.blame(f"{stage}F{min(others, default=0)} is missing: stage {stage} has no forward")

    def check_complete(self, microbatches: int | None) -> None:
        """Each stage and microbatch exactly once per kind."""
        depth, batches = self.placement.depth, self.actions.microbatches
        backward = any(action.kind in (Kind.B, Kind.I, Kind.W) for action in self.places)
        numbers = {action.microbatch for action in self.places if action.microbatch is not None}
        everywhere: set[int] = set()
        for first in range(0, self.placement.num_stages, depth):
            stages = range(first, first + depth)
            expected = {m for stage in stages for m in batches.get(stage, ())}
            expected = numbers if self.placement.chains == 1 else expected
            everywhere |= expected
            for stage in stages:
                for m in sorted(expected):
                    self._check_once(stage, m, backward)
        for m in sorted(set(range(max(microbatches or 0, max(everywhere, default=-1) + 1))) - everywhere):
            self.blame(f"0F{m} is missing: microbatch {m} is nowhere")

    def _check_once(self, stage: int, m: int, backward: bool) -> None:
        halves = [Action(stage, kind, m) for kind in (Kind.I, Kind.W)]
        split = any(self.places.get(half) for half in halves)
        full = Action(stage, Kind.B, m)
        wanted = [Action(stage, Kind.F, m)]
        if backward:
            wanted += halves if split else [full]
        if split and self.places.get(full):
            self.blame(f"{full} ({self.where(full)}) repeats its own halves", self.places[full][0])
        for action in wanted:
            found = self.places.get(action, [])
            if not found:
                self.blame(f"{action} is missing", *self.places.get(Action(stage, Kind.F, m), [])[:1])
            elif len(found) > 1:
                spots = " and ".join(f"rank {rank} position {at}" for rank, at in found[:2])
                self.blame(f"{action} is there {len(found)} times: {spots}", *found[:2])

    def check_local_order(self) -> None:
        """On its own rank, everything comes after what it needs; also recomputation and sharding."""
        placement = self.placement
        for rank, row in enumerate(self.actions.ranks):
            at = {action: position for position, action in reversed(list(enumerate(row)))}
            for position, action in enumerate(row):
                again = action._replace(kind=Kind.RECOMPUTE)
                if action.kind is Kind.RECOMPUTE and len(self.places[action]) > 1:
                    self.blame(f"{action} is there {len(self.places[action])} times", *self.places[action][:2])
                if action.kind in (Kind.B, Kind.I) and at.get(again, -1) > position:
                    self._blame_order(rank, position, action, again, at[again])
                if action.kind in COMPUTE or action.kind is Kind.RECOMPUTE:
                    for need in _local_needs(placement, action, rank):
                        place = self._found(need, at)
                        if place is None or place > position:
                            self._blame_order(rank, position, action, need, place)
            self._check_sharding(rank, row)

    @staticmethod
    def _found(need: Action, at: dict[Action, int]) -> int | None:
        """Where a needed action stands on the rank; an input gradient may be part of a full backward."""
        if need in at:
            return at[need]
        return at.get(need._replace(kind=Kind.B)) if need.kind is Kind.I else None

    def _blame_order(self, rank: int, position: int, action: Action, need: Action, place: int | None) -> None:
        later = "is missing" if place is None else f"only comes at position {place}"
        spots = [(rank, position)] + ([] if place is None else [(rank, place)])
        self.blame(f"rank {rank} position {position}: {action} needs {need}, which {later}", *spots)

    def _check_sharding(self, rank: int, row: tuple[Action, ...]) -> None:
        self._check_reduction(rank, row)
        sharded = {action.stage for action in row if action.kind in (Kind.UNSHARD, Kind.RESHARD)}
        gathered: set[int] = set()
        for at, (stage, kind, _) in enumerate(row):
            here = f"rank {rank} position {at}: {row[at]}"
            if kind is Kind.UNSHARD:
                gathered.add(stage)
            elif kind is Kind.RESHARD:
                if stage not in gathered:
                    self.blame(f"{here} frees a stage that is not gathered", (rank, at))
                gathered.discard(stage)
            elif (kind in COMPUTE or kind is Kind.RECOMPUTE) and stage in sharded and stage not in gathered:
                self.blame(f"{here} uses a stage that is not gathered: {stage}UNSHARD is missing before it", (rank, at))

    def _check_reduction(self, rank: int, row: tuple[Action, ...]) -> None:
        """If gradients are reduced, then each stage's once, after its last weight gradient."""
        last = {action.stage: at for at, action in enumerate(row) if action.kind in (Kind.B, Kind.W)}
        if not any(action.kind is Kind.REDUCE_GRAD for action in self.places):
            return
        for stage, at in last.items():
            reduction = Action(stage, Kind.REDUCE_GRAD)
            found = [position for position, action in enumerate(row) if action == reduction]
            if len(found) != 1:
                number = f"is there {len(found)} times" if found else "is missing"
                self.blame(f"{reduction} {number}: rank {rank} must reduce stage {stage} once", (rank, at))
            elif found[0] < at:
                here = f"rank {rank} position {found[0]}: {reduction}"
                self.blame(f"{here} comes before {row[at]} (position {at})", (rank, found[0]), (rank, at))

    def check_messages(self) -> None:
        """Every result that another rank needs is sent once and received once, after it is there and before its use."""
        expected: set[Action] = set()
        for rank, row in enumerate(self.actions.ranks):
            for position, action in enumerate(row):
                if action.kind not in COMPUTE or receiver(self.placement, action) is None:
                    continue
                send, receive = message(action)
                expected |= {send, receive}
                self._check_end(send, rank, after=position, before=None, why=action)
                peer = self.placement.ranks[receive.stage]
                use = _user(receive, self.places)
                self._check_end(receive, peer, after=None, before=use[1] if use else None, why=action)
        for action, places in self.places.items():
            if (action.kind in SENDS or action.kind in RECEIVES) and action not in expected:
                rank, at = places[0]
                self.blame(f"rank {rank} position {at}: {action} is a message nobody needs", places[0])

    def _check_end(self, end: Action, rank: int, *, after: int | None, before: int | None, why: Action) -> None:
        found = self.places.get(end, [])
        if len(found) != 1:
            number = f"is there {len(found)} times" if found else "is missing"
            self.blame(f"{end} {number}: rank {rank} must have it once for the result of {why}", *found[:2])
            return
        holder, at = found[0]
        if holder != rank:
            self.blame(f"rank {holder} position {at}: {end} belongs on rank {rank}", found[0])
        elif after is not None and at < after:
            self.blame(
                f"rank {rank} position {at}: {end} comes before {why} (position {after})", (rank, at), (rank, after)
            )
        elif before is not None and at > before:
            user = self.actions.ranks[rank][before]
            self.blame(
                f"rank {rank} position {at}: {end} comes after {user} (position {before})", (rank, at), (rank, before)
            )

    def check_links(self) -> None:
        """Both ends of each directed link have its messages in the same order."""
        sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
        receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for rank, row in enumerate(self.actions.ranks):
            for action in row:
                if action.kind in SENDS:
                    sends[rank, _peer(self.placement, action)].append(action)
                elif action.kind in RECEIVES:
                    receives[_peer(self.placement, action), rank].append(action)
        for link in sorted(sends):
            for sent, received in zip(sends[link], receives[link], strict=True):
                if _counterpart(sent) != received:
                    one, other = self.places[sent][0], self.places[received][0]
                    self.blame(
                        f"rank {link[0]} sends {sent} (position {one[1]}) where rank {link[1]} expects "
                        f"{received} (position {other[1]})",
                        one,
                        other,
                    )
                    break


def _local_needs(placement: Placement, action: Action, rank: int) -> list[Action]:
    """What an action needs of its own rank: its stage's earlier actions, a received tensor, a local hand-over."""
    stage, kind, m = action
    needs: list[Action] = []
    if kind is not Kind.F:
        needs.append(Action(stage, Kind.I if kind is Kind.W else Kind.F, m))
    if kind is Kind.F and not placement.is_first(stage) and placement.ranks[stage - 1] == rank:
        needs.append(Action(stage - 1, Kind.F, m))
    if kind in (Kind.B, Kind.I) and not placement.is_last(stage) and placement.ranks[stage + 1] == rank:
        needs.append(Action(stage + 1, Kind.I, m))
    return needs


def _user(receive: Action, places: dict[Action, list[Place]]) -> Place | None:
    """Where a received tensor is used."""
    stage, kind, m = receive
    kinds = (Kind.F,) if kind is Kind.RECV_F else (Kind.B, Kind.I)
    found = [places[Action(stage, use, m)][0] for use in kinds if places.get(Action(stage, use, m))]
    return found[0] if found else None


def _peer(placement: Placement, action: Action) -> int:
    """The rank at the other end of a message."""
    step = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}[action.kind]
    return placement.ranks[action.stage + step]


def _counterpart(send: Action) -> Action:
    stage, kind, m = send
    return message(Action(stage, Kind.F if kind is Kind.SEND_F else Kind.B, m))[1]


# --- waiting in a circle ---


def _check_no_circle(actions: Actions) -> None:
    """With channels that hold nothing. If that works, it works with any capacity: there, sends wait for less."""
    stuck = _exchange(actions, 0)
    if not stuck:
        return
    hanging = ["0", *(name for name, capacity in (("1", 1), ("unbounded", None)) if _exchange(actions, capacity))]
    circle = _shortest_circle({rank: peer for rank, (_, peer) in stuck.items()})
    lines = [f"ranks wait for each other in a circle (channel capacity {', '.join(hanging)}):"]
    for rank in circle:
        at, peer = stuck[rank]
        theirs, there = stuck[peer][0], actions.ranks[peer][stuck[peer][0]]
        lines.append(
            f"rank {rank} position {at}: {actions.ranks[rank][at]} waits for rank {peer}, "
            f"which is in {there} (position {theirs})"
        )
    raise ScheduleError(lines, actions, [(rank, stuck[rank][0]) for rank in circle])


def _exchange(actions: Actions, capacity: int | None) -> dict[int, tuple[int, int]]:
    """Run the messages alone; for each rank that gets stuck, its position and the peer it waits for."""
    placement = actions.placement
    rows = [
        [(at, action, _peer(placement, action)) for at, action in enumerate(row) if action.kind in SENDS | RECEIVES]
        for row in actions.ranks
    ]
    position = [0] * len(rows)
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    todo = list(range(len(rows)))
    while todo:
        rank = todo.pop()
        row = rows[rank]
        while position[rank] < len(row):
            _, action, peer = row[position[rank]]
            is_send = action.kind in SENDS
            link = (rank, peer) if is_send else (peer, rank)
            if capacity == 0:
                theirs = rows[peer]
                waiting = theirs[position[peer]] if position[peer] < len(theirs) else None
                ends = (action, waiting[1]) if is_send and waiting else (waiting[1], action) if waiting else None
                if ends is None or ends[0].kind not in SENDS or _counterpart(ends[0]) != ends[1]:
                    break
                position[peer] += 1
            elif is_send:
                if capacity is not None and sent[link] - received[link] >= capacity:
                    break
                sent[link] += 1
            else:
                if sent[link] == received[link]:
                    break
                received[link] += 1
            position[rank] += 1
            todo.append(peer)
    return {
        rank: (row[position[rank]][0], row[position[rank]][2])
        for rank, row in enumerate(rows)
        if position[rank] < len(row)
    }


def _circle_of_actions(actions: Actions, stuck: Stuck) -> ScheduleError:
    """The circle in which ranks of a compute-only schedule wait."""
    placement = actions.placement
    rows = _bare(actions).ranks
    owner = {rank: placement.ranks[need.stage] for rank, (_, need) in stuck.waiting.items()}
    circle = _shortest_circle(owner)
    lines = ["ranks wait for each other in a circle:"]
    places = []
    for rank in circle:
        at, need = stuck.waiting[rank]
        other = owner[rank]
        theirs = stuck.waiting[other][0]
        wanted = next(i for i, action in enumerate(rows[other]) if _same_result(action, need))
        lines.append(
            f"rank {rank} position {at}: {rows[rank][at]} needs {rows[other][wanted]}, which rank {other} has at "
            f"position {wanted}, behind {rows[other][theirs]} (position {theirs})"
        )
        places.append((rank, at))
    return ScheduleError(lines, _bare(actions), places)


def _same_result(action: Action, need: Action) -> bool:
    same = action.stage == need.stage and action.microbatch == need.microbatch
    return same and (action.kind is need.kind or (need.kind is Kind.I and action.kind is Kind.B))


def _shortest_circle(waits_for: dict[int, int]) -> list[int]:
    """The shortest circle in 'each rank waits for one other'."""
    best: list[int] = []
    for start in waits_for:
        path: list[int] = []
        rank = start
        while rank in waits_for and rank not in path:
            path.append(rank)
            rank = waits_for[rank]
        circle = path[path.index(rank) :] if rank in path else []
        if circle and (not best or len(circle) < len(best)):
            best = circle
    return best
