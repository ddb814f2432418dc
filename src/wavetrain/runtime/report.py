"""Who is to blame when a run fails or hangs: the culprit, the chain of ranks blocked behind it, every rank's action.

`trouble` says whether something is wrong, `diagnose` what; both are pure. A rank that merely lost its connection to a
peer, or waited for one, is never blamed while somebody else can be.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from wavetrain.base.codec import Json
from wavetrain.runtime.progress import Phase, Progress
from wavetrain.schedule.action import Action, Actions, Kind

SCHEMA = "wavetrain.hang/1"
MOST_ROWS = 12  # ranks listed in the text; the JSON has all

# What gloo (torch 2.13) says where a peer has gone or does not answer, and the system's own words for it.
_LOST = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Socket closed|Read error|Write error"
    r"|Timed out waiting|Socket Timeout|Application timeout|connectFullMesh failed|DistNetworkError|DistStoreError"
    r"|No route to host|Network is unreachable|failed to recv|short (read|write)"
    r"|Wait timeout|recvValue failed|Connection was likely closed",
    re.IGNORECASE,
)


_SOURCE = re.compile(r"\[[^\]\s]*\.(cc|cpp|h|hpp):\d+\]\s*")  # the place in C++ that gloo's texts begin with


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a rank that makes no progress counts as hung, and how long the end may take."""

    step_s: float = 0.0  # predicted time of a step
    factor: float = 3.0
    floor_s: float = 10.0
    start_s: float = 120.0  # until a rank's first action: model creation, meeting the others
    silent_s: float = 2.5  # without a heartbeat; they come at least every 0.5 s
    grace_s: float = 0.5  # for the other ranks' last words, before blame is laid
    end_s: float = 1.0  # between asking a process to end and killing it

    @property
    def wait_s(self) -> float:
        """The longest a rank may stay at one thing."""
        return max(self.floor_s, self.factor * self.step_s)

    def of(self, phase: Phase) -> float:
        return max(self.start_s, self.wait_s) if phase is Phase.STARTING else self.wait_s

    @property
    def hush_s(self) -> float:
        """The silence that tells a rank cut off from one that is busy; shorter than the wait that shows the hang."""
        return min(self.silent_s, 0.75 * self.wait_s)

    @property
    def patience_s(self) -> float:
        """The longest a rank may wait for one that does make progress."""
        return 10 * self.wait_s


@dataclass(frozen=True, kw_only=True)
class Status:
    """What is known of a rank at a moment; ages by the reader's clock."""

    rank: int
    progress: Progress | None = None  # None: it has never said anything
    unchanged_s: float = 0.0  # since its progress last changed
    silent_s: float = 0.0  # since its last heartbeat
    state: str = ""  # of its process, as in /proc: R, S, D, T (stopped), Z; X: gone; "" where it can't be seen
    exit_code: int | None = None  # as known by its parent; -9: killed by signal 9
    host: str = ""
    pid: int = 0
    trace: str = ""  # of the exception, or of what it was doing
    order: int = 0  # among the ranks that failed, from 1

    @property
    def phase(self) -> Phase:
        return self.progress.phase if self.progress else Phase.STARTING

    @property
    def is_over(self) -> bool:
        """Whether its process has ended."""
        return self.exit_code is not None or self.state in ("X", "Z")

    @property
    def error(self) -> str:
        return self.progress.error if self.progress and self.phase is Phase.FAILED else ""

    @property
    def lost_connection(self) -> bool:
        return bool(_LOST.search(self.error))


class Cause(StrEnum):
    """Why a rank is to blame; the first that applies to any rank is the one that counts."""

    KILLED = "killed"
    EXCEPTION = "exception"
    EXITED = "exited"  # before its work was done
    STOPPED = "stopped"
    SILENT = "silent"
    COMPUTING = "computing"  # far too long
    STARTING = "starting"  # far too long
    LEFT = "left"  # done while others still needed it
    LINK = "link"  # everyone waits: a message was lost, or the order of actions is wrong


@dataclass(frozen=True, kw_only=True)
class Report:
    """The answer: `culprit` is a rank; with `Cause.LINK` the sending end, and `peer` is the rank that waits."""

    culprit: int
    peer: int = -1
    cause: Cause
    why: str  # "rank 1 was killed by signal 9 (SIGKILL)"
    chain: tuple[int, ...]  # the culprit, a rank that waits for it, one that waits for that, ...
    statuses: tuple[Status, ...]

    @property
    def text(self) -> str:
        """For people, about ten lines."""
        lines = [f"run failed: {self.why}{_place(self.statuses[self.culprit])}"]
        if len(self.chain) > 1:
            lines.append(f"  blocked: {self._sentence()}")
        order = [*self.chain, *(s.rank for s in self.statuses if s.rank not in self.chain)]
        lines += (f"  {_row(self.statuses[rank])}" for rank in order[:MOST_ROWS])
        if len(order) > MOST_ROWS:
            lines.append(f"  and {len(order) - MOST_ROWS} more ranks (all in the JSON report)")
        if self.statuses[self.culprit].trace:
            lines += ("", *(f"  | {line}" for line in self.statuses[self.culprit].trace.rstrip().splitlines()))
        return "\n".join(lines)

    def _sentence(self) -> str:
        links: list[str] = []
        for source, rank in reversed(tuple(itertools.pairwise(self.chain))):
            links.append(f"{'which' if links else f'rank {rank}'} {_waits(self.statuses[rank], source)}")
        if self.cause is not Cause.LINK:
            links.append("which " + re.split(r"[:(,]", self.why.removeprefix(f"rank {self.culprit} "))[0].strip())
        elif needs := _needs(self.statuses[self.culprit], self.statuses):
            links.append(f"which {_waits(self.statuses[self.culprit], needs[0])}")
        return ", ".join(links)

    def document(self) -> Json:
        """For programs: culprit first, then every rank, the blocked chain before the others."""
        order = [*self.chain, *(s.rank for s in self.statuses if s.rank not in self.chain)]
        peer = {"peer": self.peer} if self.peer >= 0 else {}
        return {
            "schema": SCHEMA,
            "culprit": self.culprit,
            **peer,
            "cause": self.cause.value,
            "why": self.why,
            "chain": list(self.chain),
            "ranks": [_entry(self.statuses[rank]) for rank in order],
        }


def trouble(statuses: Sequence[Status], limits: Limits) -> bool:
    """Whether a rank has failed, left too early, or is stuck behind one that makes no progress."""
    if any(s.phase is Phase.FAILED or (s.is_over and s.phase is not Phase.DONE) for s in statuses):
        return True
    return any(_is_hung(s, statuses, limits) for s in statuses)


def _is_hung(status: Status, statuses: Sequence[Status], limits: Limits) -> bool:
    if status.phase is Phase.DONE or status.unchanged_s <= limits.of(status.phase):
        return False
    if status.unchanged_s > limits.patience_s:
        return True
    root = statuses[_behind(status.rank, statuses)[-1]]
    unheard = root.progress is not None and root.silent_s > limits.wait_s  # what it last said may be long past
    return root.phase is Phase.DONE or unheard or root.unchanged_s > limits.of(root.phase)


def diagnose(statuses: Sequence[Status], limits: Limits, actions: Actions | None = None) -> Report:
    """Who is to blame, given that something is wrong. `actions` tell a lost message from one that was never sent."""
    for cause in Cause:  # gravest first
        guilty = [s for s in statuses if _guilty_of(s, cause, statuses, limits)]
        if guilty:
            depth = {s.rank: len(_blocked_by(s.rank, statuses)) for s in guilty}
            first = min(guilty, key=lambda s: (s.order, -depth[s.rank]))
            return _report(first.rank, cause, _why(first, cause), statuses)
    return _link(statuses, actions)


def _guilty_of(status: Status, cause: Cause, statuses: Sequence[Status], limits: Limits) -> bool:
    if cause is Cause.LEFT:
        return status.phase is Phase.DONE and any(status.rank in _needs(s, statuses) for s in statuses)
    if cause is Cause.EXCEPTION:
        return bool(status.error) and not status.lost_connection
    if status.phase in (Phase.DONE, Phase.FAILED):
        return False
    if status.is_over:
        return cause is Cause.EXITED or (cause is Cause.KILLED and (status.exit_code or 0) < 0)
    return _troubles_alive(status, cause, limits)


def _troubles_alive(status: Status, cause: Cause, limits: Limits) -> bool:
    """Whether a process that has not ended blocks the others in this way."""
    overdue = status.unchanged_s > limits.of(status.phase)
    applies = {
        Cause.STOPPED: status.state.upper() == "T",
        Cause.SILENT: status.progress is not None and status.silent_s > limits.hush_s,
        Cause.COMPUTING: status.phase is Phase.COMPUTING and overdue,
        Cause.STARTING: status.phase is Phase.STARTING and overdue,
    }
    return applies.get(cause, False)


def _why(status: Status, cause: Cause) -> str:
    code = status.exit_code or 0
    seen = "its process lives, so its network is cut"
    unseen = "its network is cut, or its process is stopped or gone"
    texts = {
        Cause.KILLED: f"was killed by signal {-code} ({_signal_name(-code)})",
        Cause.EXCEPTION: f"raised an exception: {_first_line(status.error)}",
        Cause.EXITED: "exited before its work was done"
        + (": its process is gone" if status.exit_code is None else f": exit code {code}"),
        Cause.STOPPED: f"is stopped (SIGSTOP or a debugger; process {status.pid})",
        Cause.SILENT: f"is silent: no heartbeat for {status.silent_s:.1f} s; {seen if status.state else unseen}",
        Cause.COMPUTING: f"has been computing for {status.unchanged_s:.1f} s, far too long",
        Cause.STARTING: f"has been starting for {status.unchanged_s:.1f} s, far too long",
        Cause.LEFT: "was done while other ranks still needed it",
    }
    return f"rank {status.rank} {texts[cause]}"


def _link(statuses: Sequence[Status], actions: Actions | None) -> Report:
    """Nobody is to blame by itself: a connection was lost, or everybody waits."""
    lost = [s for s in statuses if s.lost_connection]
    if lost:
        first = min(lost, key=lambda s: s.order)
        source = first.progress.source if first.progress else -1
        if not 0 <= source < len(statuses):  # it waited for nobody: the error is its own
            return _report(first.rank, Cause.EXCEPTION, _why(first, Cause.EXCEPTION), statuses)
        why = f"the connection between rank {source} and rank {first.rank} was lost: {_first_line(first.error)}"
        return _report(source, Cause.LINK, why, statuses, peer=first.rank)
    waiting = [s for s in statuses if _needs(s, statuses)]
    if not waiting:
        longest = max(statuses, key=lambda s: s.unchanged_s)
        why = f"rank {longest.rank} has made no progress for {longest.unchanged_s:.1f} s"
        return _report(longest.rank, Cause.LINK, why, statuses)
    sent = {s.rank: _was_sent(s, statuses, actions) for s in waiting}
    first = max(waiting, key=lambda s: (sent[s.rank] is True, s.unchanged_s))
    source = _needs(first, statuses)[0]
    fate = {
        True: f"rank {source} is past sending it, so the link between them lost it",
        False: f"rank {source} has not sent it and waits itself: their orders do not fit together",
        None: f"rank {source} makes no progress either",
    }[sent[first.rank]]
    why = f"rank {first.rank} has waited {first.unchanged_s:.1f} s for {_awaited(first)} from rank {source}; {fate}"
    return _report(source, Cause.LINK, why, statuses, peer=first.rank)


def _report(culprit: int, cause: Cause, why: str, statuses: Sequence[Status], *, peer: int = -1) -> Report:
    chain = _blocked_by(culprit, statuses)
    return Report(culprit=culprit, peer=peer, cause=cause, why=why, chain=chain, statuses=tuple(statuses))


def _was_sent(status: Status, statuses: Sequence[Status], actions: Actions | None) -> bool | None:
    """Whether the source is past the send of the message that a rank waits for; None where that can't be told."""
    progress = status.progress
    if actions is None or progress is None or not 0 <= progress.source < actions.num_ranks:
        return None
    source = statuses[progress.source].progress
    try:
        receive = Action.parse(progress.message)
    except ValueError:
        return None
    if source is None or receive.kind not in (Kind.RECV_F, Kind.RECV_B):
        return None
    forward = receive.kind is Kind.RECV_F
    kind, stage = (Kind.SEND_F, receive.stage - 1) if forward else (Kind.SEND_B, receive.stage + 1)
    row = actions.ranks[progress.source]
    send = Action(stage, kind, receive.microbatch)
    ahead = source.step > progress.step or source.phase is Phase.DONE
    return ahead or (source.step == progress.step and send in row[: max(source.position, 0)])


def _needs(status: Status, statuses: Sequence[Status]) -> tuple[int, ...]:
    """The ranks that a rank waits for, or waited for when it lost a connection; the likeliest first."""
    progress = status.progress
    if progress is None or not (_waits_for_all(status) or progress.phase is Phase.WAITING or status.lost_connection):
        return ()
    if 0 <= progress.source < len(statuses):
        return (progress.source,)
    away = (s for s in statuses if s.rank != status.rank and not _waits_for_all(s) and not s.error)
    return tuple(s.rank for s in sorted(away, key=lambda s: -s.unchanged_s))


def _waits_for_all(status: Status) -> bool:
    progress = status.progress
    if progress is None:
        return False
    return progress.phase is Phase.COLLECTIVE or (progress.phase is Phase.WAITING and progress.source < 0)


def _behind(rank: int, statuses: Sequence[Status]) -> tuple[int, ...]:
    """A rank, the one it waits for, and so on, until one that waits for nobody or for one already named."""
    path = [rank]
    while True:
        needs = _needs(statuses[path[-1]], statuses)
        if not needs or needs[0] in path:
            return tuple(path)
        path.append(needs[0])


def _blocked_by(culprit: int, statuses: Sequence[Status]) -> tuple[int, ...]:
    """The longest chain of ranks that wait for one another, beginning at the culprit."""
    waiting: dict[int, list[int]] = {}
    for status in statuses:
        for source in _needs(status, statuses)[:1]:
            waiting.setdefault(source, []).append(status.rank)
    before: dict[int, int] = {culprit: -1}
    queue, last = [culprit], culprit
    for last in queue:  # breadth first, so that the last reached is farthest
        found = [rank for rank in waiting.get(last, ()) if rank not in before]
        before.update(dict.fromkeys(found, last))
        queue += found
    chain = [last]
    while before[chain[-1]] >= 0:
        chain.append(before[chain[-1]])
    return tuple(reversed(chain))


def _waits(status: Status, source: int) -> str:
    verb = "lost its connection, waiting" if status.lost_connection else "waits"
    return f"{verb} for {_awaited(status)} from rank {source}"


def _awaited(status: Status) -> str:
    return (status.progress.message if status.progress else "") or "a collective"


def _place(status: Status) -> str:
    progress = status.progress
    if progress is None:
        return ", before it said anything"
    return f", in step {progress.step} at {progress.action}" if progress.action else f", in step {progress.step}"


def _row(status: Status) -> str:
    progress = status.progress
    line = f"rank {status.rank:<3} {_condition(status):<22}"
    if progress is None:
        return line.rstrip()
    line += f" step {progress.step:<4} {progress.action or '-':<8}"
    if progress.message:
        line += f" for {progress.message} from rank {progress.source}"
    if status.error:
        line += f" {_first_line(status.error)[:100]}"
    return line.rstrip()


def _condition(status: Status) -> str:
    if status.exit_code is not None and status.exit_code < 0:
        return f"killed by signal {-status.exit_code}"
    if status.phase in (Phase.FAILED, Phase.DONE):
        return status.phase.value
    if status.is_over:
        return "gone" if status.exit_code is None else f"exited with {status.exit_code}"
    if status.state.upper() == "T":
        return f"stopped {status.unchanged_s:.1f} s"
    return f"{status.phase.value} {status.unchanged_s:.1f} s"


def _entry(status: Status) -> Json:
    progress = status.progress or Progress(rank=status.rank)
    return {
        "rank": status.rank,
        "host": status.host,
        "pid": status.pid,
        "phase": status.phase.value,
        "step": progress.step,
        "position": progress.position,
        "action": progress.action,
        "waits_for": progress.message,
        "from_rank": progress.source if progress.source >= 0 else None,
        "unchanged_s": round(status.unchanged_s, 3),
        "silent_s": round(status.silent_s, 3),
        "process_state": status.state,
        "exit_code": status.exit_code,
        "error": status.error,
        "trace": status.trace,
    }


def _first_line(text: str) -> str:
    return _SOURCE.sub("", text.strip().partition("\n")[0]).partition(". This is typically caused")[0][:300]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
