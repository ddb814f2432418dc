"""A plain simulator that walks the lists, to hold the fast one against."""

from collections import defaultdict

from wavetrain.schedule import Action, Kind
from wavetrain.schedule.action import COMPUTE
from wavetrain.sim.engine import Messages


class Walk:
    """Walks the lists as far as they go, over and over; holds every interval of memory."""

    def __init__(self, actions, times, sizes, rules):
        self.actions, self.times, self.sizes, self.rules = actions, times, sizes, rules
        size = actions.num_ranks
        self.at, self.clock, self.shard = [0] * size, [0.0] * size, [0.0] * size
        self.computed = [[] for _ in range(size)]  # (start, end)
        self.links = defaultdict(float)
        self.sent, self.ends, self.gathered, self.last = {}, {}, {}, {}
        self.held = [[] for _ in range(size)]  # [start, end, bytes]
        self.open = {}  # what is held -> its interval
        self.launched = set()
        self.makespan = 0.0
        progress = True
        while progress:
            progress = False
            for rank, row in enumerate(actions.ranks):
                while self.at[rank] < len(row) and self.step(rank, row[self.at[rank]]):
                    self.at[rank] += 1
                    progress = True
        assert self.at == [len(row) for row in actions.ranks]
        self.makespan = max([self.makespan, *self.clock, *self.shard])

    def hold(self, rank, name, start, size):
        self.open[name] = interval = [start, float("inf"), size]
        self.held[rank].append(interval)

    def release(self, name, end):
        if name in self.open:
            self.open.pop(name)[1] = end

    def peak(self, rank):
        moments = {start for start, _, _ in self.held[rank]}
        totals = [sum(size for start, end, size in self.held[rank] if start <= m < end) for m in moments]
        return max(totals, default=0)

    def step(self, rank, action):
        kind = action.kind
        if kind in COMPUTE or kind is Kind.RECOMPUTE:
            return self.compute(rank, action)
        if kind in (Kind.SEND_F, Kind.SEND_B):
            return self.send(rank, action)
        if kind in (Kind.RECV_F, Kind.RECV_B):
            return self.receive(rank, action)
        self.change_shards(rank, action)
        return True

    def compute(self, rank, action):
        stage, kind, m = action
        t, s = self.times[stage], self.sizes[stage]
        receive = Action(stage, {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}.get(kind, kind), m)
        if receive in self.actions.ranks[rank] and receive.kind is not kind and receive not in self.sent:
            return False
        arrival = self.sent.get(receive, 0.0)
        start = max(self.clock[rank], arrival, self.gathered.get(stage, 0.0))
        seconds = {Kind.F: t.f, Kind.B: t.i + t.w, Kind.I: t.i, Kind.W: t.w, Kind.RECOMPUTE: t.recompute}[kind]
        end = self.clock[rank] = start + seconds
        self.computed[rank].append((start, end))
        self.release(receive, start)
        if kind is not Kind.F and kind is not Kind.RECOMPUTE:
            self.last[stage] = end
            self.held[rank].append([start, end, s.transient_b])
        self.remember(rank, action, start, end)
        return True

    def remember(self, rank, action, start, end):
        stage, kind, m = action
        s, row = self.sizes[stage], self.actions.ranks[rank]
        if kind is Kind.F:
            self.held[rank].append([start, end, s.transient_f])
            if any(Action(stage, other, m) in row for other in (Kind.B, Kind.I)):
                self.hold(rank, (stage, m, "early"), start, s.saved - s.saved_for_w)
                self.hold(rank, (stage, m, "late"), start, s.saved_for_w)
        elif kind is Kind.RECOMPUTE:
            self.hold(rank, (stage, m, "again"), start, s.recomputed)
        freed = {Kind.B: ("early", "late", "again"), Kind.I: ("early",), Kind.W: ("late", "again")}
        for what in freed.get(kind, ()):
            self.release((stage, m, what), end)

    def other_end(self, action):
        stage, kind, m = action
        step = {Kind.SEND_F: 1, Kind.RECV_B: 1, Kind.SEND_B: -1, Kind.RECV_F: -1}[kind]
        name = kind.value.replace("SEND", "x").replace("RECV", "SEND").replace("x", "RECV")
        return Action(stage + step, Kind(name), m), self.actions.placement.ranks[stage + step]

    def launch(self, rank, action):
        if action not in self.launched:
            self.launched.add(action)
            self.clock[rank] += self.times[action.stage].message_s

    def send(self, rank, action):
        receive, peer = self.other_end(action)
        self.launch(rank, action)
        t = self.times[action.stage]
        seconds = t.send_f if action.kind is Kind.SEND_F else t.send_b
        if self.rules.messages is Messages.BLOCKING:
            if receive not in self.launched:
                return False
            if receive in self.sent:
                return True
            start = max(self.clock[rank], self.clock[peer])
            self.clock[rank] = self.clock[peer] = start + seconds
        else:
            start = max(self.clock[rank], self.links[rank, peer])
            self.links[rank, peer] = start + seconds
        self.sent[receive] = start + seconds
        self.makespan = max(self.makespan, start + seconds)
        self.hold(peer, receive, start, self.sizes[receive.stage].message)
        return True

    def receive(self, rank, action):
        self.launch(rank, action)
        return self.rules.messages is Messages.OVERLAPPED or action in self.sent

    def change_shards(self, rank, action):
        stage, kind, _ = action
        t, ends = self.times[stage], [end for _, end in self.computed[rank]]
        if kind is Kind.RESHARD:
            self.release((stage, "gathered"), max(self.clock[rank], self.gathered[stage]))
        elif kind is Kind.UNSHARD:
            allowed = ends[: len(ends) - self.rules.prefetch]
            start = max(self.shard[rank], allowed[-1] if allowed and len(ends) > self.rules.prefetch else 0.0)
            self.shard[rank] = self.gathered[stage] = start + t.unshard
            self.hold(rank, (stage, "gathered"), start, self.sizes[stage].gathered)
        else:
            self.shard[rank] = max(self.shard[rank], self.last[stage]) + t.reduce
