"""Copies of a run in the memory of its hosts: every shard on its own host and on the next one, without a disk.

    neighbours = Neighbours(world, folder, has_shard=True, timeout_s=600)  all ranks, together
    found = neighbours.newest()                       after a start: what all hosts together have whole
    path, shards = neighbours.bring(found, needed)    what ranks need and their host has not is sent to it
    neighbours.save(12, entries)                      in a thread, beside the steps
    neighbours.end()                                  the run ended well: nothing is left

What is on a host is in shelf.py. Ranks are on one host if they see the same folder. A copy is complete when every shard
and every neighbour's copy of it is written, and only then the one before it is removed, so whatever is killed when, and
whichever host is lost, one copy is whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wavetrain.base.errors import RunError
from wavetrain.base.units import MIB
from wavetrain.runtime.inject import When
from wavetrain.runtime.manifest import Manifest, Shard, faults_of_cover, pack, unpack
from wavetrain.runtime.shelf import Copy, copy_named, open_shelf
from wavetrain.runtime.tensorfile import Entry, write_shard
from wavetrain.runtime.world import World

LOG = logging.getLogger(__name__)
MESSAGE = 16 * MIB  # bytes sent at once


@dataclass(frozen=True)
class Hosts:
    """Which ranks are where; hosts are in the order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(names: Sequence[str]) -> Hosts:
        """By each rank's name of its host."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        return Hosts(tuple(map(tuple, found.values())))

    def host(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.ranks) if rank in ranks)

    def mates(self, rank: int) -> tuple[int, ...]:
        """All ranks of a rank's host."""
        return self.ranks[self.host(rank)]

    def neighbours(self) -> list[int | None]:
        """By rank, who keeps a second copy of its shard: the same place on the next host, if there is another host."""
        found: dict[int, int | None] = {}
        for host, ranks in enumerate(self.ranks):
            there = self.ranks[(host + 1) % len(self.ranks)]
            pairs = {rank: there[number % len(there)] for number, rank in enumerate(ranks)}
            found |= pairs if len(self.ranks) > 1 else dict.fromkeys(ranks)
        return [found[rank] for rank in sorted(found)]


@dataclass(frozen=True)
class Found:
    """A copy that all hosts together have whole."""

    copy: Copy
    shards: Mapping[str, Shard]  # by file
    holders: Mapping[str, frozenset[int]]  # hosts, by file

    def told(self) -> Any:
        """As other ranks are told."""
        return [self.copy.name, [[pack(shard), sorted(self.holders[file])] for file, shard in self.shards.items()]]

    @staticmethod
    def read(told: Any) -> Found:
        name, files = told
        known = {(shard := unpack(facts)).file: (shard, frozenset(hosts)) for facts, hosts in files}
        shards = {file: shard for file, (shard, _) in known.items()}
        return Found(copy_named(name), shards, {file: hosts for file, (_, hosts) in known.items()})


class Move(NamedTuple):
    """A file on its way from one rank's host to another's."""

    file: str
    source: int
    target: int


def newest_whole(held: Iterable[tuple[int, Copy, Shard]]) -> Found | None:
    """The newest copy of which no shard is missing, of all that hosts have."""
    shards: dict[Copy, dict[str, Shard]] = {}
    holders: dict[Copy, dict[str, set[int]]] = {}
    for host, copy, shard in held:
        shards.setdefault(copy, {})[shard.file] = shard
        holders.setdefault(copy, {}).setdefault(shard.file, set()).add(host)
    for copy, files in sorted(shards.items(), reverse=True):
        whole = Manifest(run="", step=copy.step, plan_hash="", shards=tuple(files.values()))
        if len(files) == copy.shards and not faults_of_cover(whole):
            return Found(copy, files, {file: frozenset(hosts) for file, hosts in holders[copy].items()})
        LOG.warning("copy in memory, not used: after %d steps, %d of %d shards", copy.step, len(files), copy.shards)
    return None


def moves_of(found: Found, needs: Sequence[Iterable[str]], hosts: Hosts) -> list[Move]:
    """What is sent by whom to whom, so that every host has what its ranks need: a file once per host."""
    moves = []
    for host, ranks in enumerate(hosts.ranks):
        needed = {file for rank in ranks for file in needs[rank]}
        missing = sorted(file for file in needed if host not in found.holders[file])
        for number, file in enumerate(missing):
            senders = hosts.ranks[min(found.holders[file])]
            moves.append(Move(file, senders[number % len(senders)], ranks[number % len(ranks)]))
    return moves


class Neighbours:
    """One rank's part in it. Messages have a process group of their own: a thread uses it beside the steps."""

    def __init__(self, world: World, path: Path, *, has_shard: bool, timeout_s: float) -> None:
        """All ranks call this together; `path` is the run's folder in this host's memory."""
        self._rank, self._size = world.rank, world.size
        self._shelf = open_shelf(path)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        told = self._gather([self._shelf.host, has_shard, secrets.token_hex(4)])
        hosts, has, starts = zip(*self._spread(told), strict=True)
        self._hosts, self._shards, self._start = Hosts.of(hosts), sum(has), starts[0]
        self._mates = self._hosts.mates(self._rank)
        targets = self._hosts.neighbours()
        self._target = targets[self._rank]
        self._sources = [rank for rank, target in enumerate(targets) if target == self._rank]
        self._leads = self._rank == self._mates[0]
        if self._leads:
            self._shelf.lock()
        self._agree(True)  # every host's folder is locked

    # --- saving ---

    def save(self, step: int, entries: Sequence[Entry], *, reached: Callable[[When], None] = lambda _: None) -> bool:
        """Copy this rank's tensors to its host's memory and its neighbour's; whether all ranks could.

        Where there is no room the copy is given up, and the one before stays.
        """
        copy = Copy(step, self._shards, self._start)
        shard = None
        try:
            folder = self._shelf.begin(copy)
            if entries:
                shard = write_shard(folder, self._rank, entries)
                reached(When.SAVE)
                self._shelf.record(copy, shard)
            kept = True
        except RunError as error:
            shard, kept = None, self._gave_up(step, error)
        kept &= self._exchange(copy, shard, self._target, self._sources)
        kept = self._agree(kept)
        if self._rank == 0:
            reached(When.PUBLISH)
        if self._leads:
            try:
                (self._shelf.publish if kept else self._shelf.remove)(copy)
            except RunError as error:
                kept = self._gave_up(step, error)
        return kept

    def _gave_up(self, step: int, error: RunError) -> bool:
        LOG.warning("rank %d: no copy in memory after %d steps: %s", self._rank, step, error)
        return False

    def end(self) -> None:
        """The run ended well, on all ranks: nothing is left of it. All ranks call this."""
        self._agree(True)
        try:
            self._shelf.close(remove=self._leads)
        except RunError as error:  # somebody was quicker
            LOG.warning("%s", error)

    # --- after a start ---

    def newest(self) -> Found | None:
        """The newest whole copy, every byte of it verified by the host that has it. Rank 0 gets it, all call this.

        None where nothing is lost by starting over: of remains of one that was complete, a Found of no shards tells.
        """
        mine = self._mates.index(self._rank)
        held = [(copy, file) for copy in self._shelf.copies() for file in self._shelf.files(copy)]
        self._agree(True)  # all have seen the same: bad files are removed from now on
        looked = [(copy, self._shelf.verified(copy, file)) for copy, file in held[mine :: len(self._mates)]]
        good = [[copy.name, pack(shard)] for copy, shard in looked if shard]
        told = self._gather([good, [copy.name for copy in self._shelf.complete()]])
        hosts = {rank: host for host, ranks in enumerate(self._hosts.ranks) for rank in ranks}
        found = newest_whole(
            (hosts[rank], copy_named(name), unpack(facts))
            for rank, (good, _) in enumerate(told)
            for name, facts in good
        )
        remains = [copy_named(name) for _, complete in told for name in complete]
        return found or (Found(max(remains), {}, {}) if remains else None)

    def bring(
        self, found: Found | None, needed: Callable[[int, tuple[Shard, ...]], Iterable[str]]
    ) -> tuple[Path, int, tuple[Shard, ...]]:
        """Let this host have the files that its ranks need of what rank 0 has found; where they are, step and shards.

        `needed` says which those are for this rank, of the shards after so many steps. All ranks call this.
        """
        found = Found.read(self._spread(found.told() if found else None))
        copy, shards = found.copy, tuple(found.shards.values())
        if self._leads:
            self._shelf.keep_only(copy)  # makes room, and the others are worth less
        needs = self._gather(sorted(needed(copy.step, shards)))
        kept = True
        moves = moves_of(found, needs, self._hosts) if needs else []
        for move in itertools.starmap(Move, self._spread([list(move) for move in moves])):  # one order: no ring waits
            if self._rank == move.source:
                kept &= self._exchange(copy, found.shards[move.file], move.target, ())
            elif self._rank == move.target:
                kept &= self._exchange(copy, None, None, (move.source,))
        if not self._agree(kept):
            what = f"{self._shelf.path}: the copy after {copy.step} steps can't be brought where it is needed"
            raise RunError(f"{what}; try a larger --memory-dir, or remove it on all hosts to go on from the disk")
        return self._shelf.folder(copy), copy.step, shards

    # --- among ranks ---

    def _gather(self, said: Any) -> list[Any]:
        """What all ranks say, for rank 0; nothing for others. Not through the store: it may be long, and would stay."""
        mine, rest = _bytes(said), range(1, self._size)
        if self._rank:
            self._round({0: torch.tensor([len(mine)])}, {})
            self._round({0: mine}, {})
            return []
        lengths = {rank: torch.zeros(1, dtype=torch.int64) for rank in rest}
        self._round({}, lengths)
        told = {rank: torch.empty(int(length), dtype=torch.uint8) for rank, length in lengths.items()}
        self._round({}, told)
        return [said, *(_json(told[rank]) for rank in rest)]

    def _spread(self, said: Any) -> Any:
        """What rank 0 says, for all."""
        mine = _bytes(said)
        length = torch.tensor([len(mine)])
        dist.broadcast(length, src=0, group=self._group)
        told = mine if self._rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(told, src=0, group=self._group)
        return _json(told)

    def _agree(self, kept: bool) -> bool:
        """Whether it is so on all ranks; when this returns, all were here."""
        flag = torch.tensor([int(kept)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag.item())

    def _exchange(self, copy: Copy, shard: Shard | None, target: int | None, sources: Sequence[int]) -> bool:
        """Send a shard to a rank, and keep what others send; whether all of it was kept.

        Both ends of every message count the same rounds, and within a round nobody waits before all is under way. So
        no ring of ranks can wait for itself.
        """
        facts = b"" if shard is None else pack(shard).encode()
        to = [] if target is None else [target]
        lengths = {source: torch.zeros(1, dtype=torch.int64) for source in sources}
        self._round(dict.fromkeys(to, torch.tensor([len(facts)])), lengths)
        told = {source: torch.empty(int(n), dtype=torch.uint8) for source, n in lengths.items() if n}
        to = to if facts else []
        self._round({rank: torch.frombuffer(bytearray(facts), dtype=torch.uint8) for rank in to}, told)
        incoming = {source: unpack(bytes(text.numpy()).decode()) for source, text in told.items()}
        rooms = {source: self._room(copy, one) for source, one in incoming.items()}
        answers = {rank: torch.zeros(1, dtype=torch.int64) for rank in to}
        self._round({source: torch.tensor([int(room is not None)]) for source, room in rooms.items()}, answers)
        outgoing = {rank: self._shelf.contents(copy, shard) for rank in to if shard and answers[rank]}
        arriving = {source: room for source, room in rooms.items() if room is not None}
        for at in range(0, max(map(len, (*outgoing.values(), *arriving.values())), default=0), MESSAGE):
            self._round(_slices(outgoing, at), _slices(arriving, at))
        kept = [self._keep(copy, incoming[source], room) for source, room in arriving.items()]
        return all(kept) and len(arriving) == len(rooms) and len(outgoing) == len(to)

    def _round(self, outgoing: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> None:
        works = [dist.isend(tensor, rank, group=self._group) for rank, tensor in outgoing.items()]
        works += [dist.irecv(tensor, rank, group=self._group) for rank, tensor in arriving.items()]
        for work in works:
            assert work is not None, "all ranks are in the group"
            work.wait()

    def _room(self, copy: Copy, shard: Shard) -> Tensor | None:
        try:
            return self._shelf.room(copy, shard)
        except RunError as error:
            self._gave_up(copy.step, error)
            return None

    def _keep(self, copy: Copy, shard: Shard, room: Tensor) -> bool:
        if hashlib.sha256(room.numpy().data).hexdigest() != shard.sha256:
            return self._gave_up(copy.step, RunError(f"{shard.file} has changed on its way"))
        try:
            self._shelf.record(copy, shard)
        except RunError as error:
            return self._gave_up(copy.step, error)
        return True


def _bytes(said: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def _json(told: Tensor) -> Any:
    return json.loads(bytes(told.numpy()))


def _slices(tensors: Mapping[int, Tensor], at: int) -> dict[int, Tensor]:
    return {rank: tensor[at : at + MESSAGE] for rank, tensor in tensors.items() if at < len(tensor)}
