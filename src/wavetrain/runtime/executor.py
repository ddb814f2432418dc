"""One rank's actions, carried out in order: a plain interpreter. Whatever the schedule, there is no other loop.

Results are kept by the microbatch they belong to, never by order of arrival. A result for another stage of this rank is
handed over as it is; one for another rank is sent. A receive is posted some places before its own, and waited for when
it is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from wavetrain.runtime.chunk import Batch, Chunk
from wavetrain.runtime.progress import Phase, Progress
from wavetrain.runtime.transport import BACKWARD, FORWARD, Message, Transport
from wavetrain.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Actions, Kind
from wavetrain.schedule.passes import add_communication, message
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.table import uncollected

AHEAD = 4  # receives posted before their place; two are enough on gloo, each more costs a buffer


class Moment(NamedTuple):
    """One action as it happened; times of this host's monotonic clock."""

    name: str
    lane: str
    start_s: float
    end_s: float
    live: int  # activations (of one stage and microbatch) that the rank holds after it
    held_bytes: int  # and what they take


@dataclass(frozen=True)
class Boundary:
    """The tensor that crosses between stages: known from the plan, so nobody asks."""

    shapes: Mapping[int, tuple[int, ...]]  # by microbatch
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    ranks: tuple[int, ...] = ()  # of the pipeline, by their numbers among all; none: it is all there is

    @property
    def most_bytes(self) -> int:
        return max(1, *map(prod, self.shapes.values())) * self.dtype.itemsize  # a whole module has no boundary

    def rank_of(self, stage_rank: int) -> int:
        return self.ranks[stage_rank] if self.ranks else stage_rank

    def buffer(self, microbatch: int) -> Tensor:
        return torch.empty(self.shapes[microbatch], dtype=self.dtype, device=self.device)


class Instruction(NamedTuple):
    """An action with everything looked up that is the same in every step."""

    name: str
    action: Action
    stage: int
    microbatch: int
    run: Callable[[Instruction], None]
    uses: Message | None = None  # what it needs or, as a message, is
    peer: int = -1  # the rank at the other end of that
    makes: Message | None = None  # what its result is called
    lane: str = "compute"
    position: int = -1  # in the rank's row
    awaited: str = ""  # the message's name, where it comes from another rank
    source: int = -1  # that rank's number among all


Before = Callable[[int, Action], None]  # (step, action): called before each action; faults are injected here


class Executor:
    """Runs one rank's row of a schedule; holds results on their way from one action to another."""

    def __init__(
        self,
        rank: int,
        actions: Actions,
        chunks: Mapping[int, Chunk],
        transport: Transport,
        boundary: Boundary,
        *,
        progress: Progress | None = None,
        before: Before | None = None,
    ) -> None:
        """`rank` is the number in the pipeline."""
        complete = actions if actions.has_communication else add_communication(actions)
        self.rank, self.chunks = rank, chunks
        self.progress = progress or Progress(rank)
        self._transport, self._boundary, self._before = transport, boundary, before
        self._results: dict[Message, Tensor | None] = {}
        row = complete.ranks[rank]
        self._program = [self._instruction(action, complete.placement, at) for at, action in enumerate(row)]
        self._receives = [line for line in self._program if line.action.kind in RECEIVES]
        self._posted = self._passed = 0  # receives that were posted; whose place was passed
        self._moments: list[Moment] = []
        self._ended: tuple[Instruction, float, float] | None = None  # an action that is not yet in the record
        self._held = dict.fromkeys(chunks, (0, 0))  # activations and bytes that each stage holds
        self._live = self._held_bytes = 0  # the sums

    def step(self, batch: Batch) -> list[Moment]:
        """Run all actions once. What the microbatches cost is then in the last stage's `losses`."""
        progress, self._moments = self.progress, []
        self._posted = self._passed = 0
        for chunk in self.chunks.values():
            chunk.begin(batch)
        with uncollected():  # a collection of cycles in one rank would be waited for by all
            for line in self._program:
                if self._before is not None:
                    progress.computing(line.position, line.name)
                    self._before(progress.step, line.action)
                line.run(line)
            progress.together()
            self._transport.finish()
            self._record()
        progress.step += 1
        assert not self._results, "a step ended with results that nobody used"
        return self._moments

    # --- what each kind of action does ---

    def _forward(self, line: Instruction) -> None:
        chunk, x = self.chunks[line.stage], self._input(line)
        start = time.monotonic()
        result = chunk.forward(line.microbatch, x)
        self._ended = line, start, time.monotonic()
        if line.makes is not None:
            self._results[line.makes] = result

    def _backward(self, line: Instruction) -> None:
        chunk, gradient = self.chunks[line.stage], self._input(line)
        run = chunk.backward if line.action.kind is Kind.B else chunk.backward_input
        start = time.monotonic()
        result = run(line.microbatch, gradient)
        self._ended = line, start, time.monotonic()
        if line.makes is not None:
            self._results[line.makes] = result

    def _weight(self, line: Instruction) -> None:
        self._input(line)
        start = time.monotonic()
        self.chunks[line.stage].backward_weight(line.microbatch)
        self._ended = line, start, time.monotonic()

    def _recompute(self, line: Instruction) -> None:
        self._input(line)
        start = time.monotonic()
        self.chunks[line.stage].recompute(line.microbatch)
        self._ended = line, start, time.monotonic()

    def _send(self, line: Instruction) -> None:
        assert line.uses is not None
        result = self._results.pop(line.uses)
        assert result is not None, f"{line.name} has nothing to send"
        start = time.monotonic()
        self._transport.send(line.uses, line.peer, result)
        end = time.monotonic()
        self._record()  # only now: the receiver waits for the message, not for what is said of it
        self._ended = line, start, end
        self.progress.computing(line.position, line.name)

    def _receive(self, line: Instruction) -> None:  # noqa: ARG002
        self._record()
        self._passed += 1
        self._post(self._passed + AHEAD)

    # --- what they share ---

    def _input(self, line: Instruction) -> Tensor | None:
        """What an action needs, if anything, once it is here."""
        self._record()
        if not line.awaited:
            self.progress.computing(line.position, line.name)
            return None if line.uses is None else self._results.pop(line.uses)
        assert line.uses is not None
        self.progress.waiting(line.awaited, line.source, position=line.position, action=line.name)
        arrived = self._transport.wait(line.uses)
        self.progress.enter(Phase.COMPUTING)
        return arrived

    def _post(self, up_to: int) -> None:
        """Post receives in their order, up to a number of them."""
        for line in self._receives[self._posted : up_to]:
            assert line.uses is not None
            self._transport.post(line.uses, line.peer, self._boundary.buffer(line.microbatch))
            self._posted += 1

    def _record(self) -> None:
        """Put down the last action, with what is held since."""
        if self._ended is None:
            return
        (line, start_s, end_s), self._ended = self._ended, None
        if line.lane == "compute":  # only the stage of the action holds more or less than before
            chunk = self.chunks[line.stage]
            live, held = self._held[line.stage]
            self._held[line.stage] = now = chunk.live, chunk.held_bytes
            self._live += now[0] - live
            self._held_bytes += now[1] - held
        self._moments.append(Moment(line.name, line.lane, start_s, end_s, self._live, self._held_bytes))

    # --- before the first step ---

    def _instruction(self, action: Action, placement: Placement, position: int) -> Instruction:
        stage, kind, microbatch = action
        assert microbatch is not None, f"{action} comes with sharding"
        run = {Kind.F: self._forward, Kind.W: self._weight, Kind.RECOMPUTE: self._recompute}.get(kind, self._backward)
        line = Instruction(str(action), action, stage, microbatch, run, position=position)
        if kind in SENDS:
            what = Message(*_receive_of(action))
            peer = placement.ranks[what.stage]
            return line._replace(run=self._send, uses=what, peer=peer, lane=f"send to {peer}")
        if kind in RECEIVES:
            source = stage - 1 if kind is Kind.RECV_F else stage + 1
            what = Message(kind.value, stage, microbatch)
            return line._replace(run=self._receive, uses=what, peer=placement.ranks[source])
        if kind not in COMPUTE or kind is Kind.W:
            return line
        ahead = kind is Kind.F
        source, target = (stage - 1, stage + 1) if ahead else (stage + 1, stage - 1)
        begins, ends = placement.is_first(stage), placement.is_last(stage)
        if not (begins if ahead else ends):
            uses, peer = Message(FORWARD if ahead else BACKWARD, stage, microbatch), placement.ranks[source]
            awaited = str(uses) if peer != self.rank else ""
            line = line._replace(uses=uses, peer=peer, awaited=awaited, source=self._boundary.rank_of(peer))
        if not (ends if ahead else begins):
            line = line._replace(makes=Message(FORWARD if ahead else BACKWARD, target, microbatch))
        return line


def _receive_of(send: Action) -> tuple[str, int, int]:
    """The receive that belongs to a send."""
    made = Action(send.stage, Kind.F if send.kind is Kind.SEND_F else Kind.I, send.microbatch)
    _, receive = message(made)
    assert receive.microbatch is not None
    return receive.kind.value, receive.stage, receive.microbatch
