"""`World`: one rank's place among all, and its store. Read from torchrun's or Slurm's variables, or given by `launch`.

Nothing here is global: a `World` is made where a process starts and is passed down.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from wavetrain.base.errors import InputError, Problem, RunError
from wavetrain.runtime.progress import Progress

__all__ = [
    "Place",
    "Store",
    "World",
    "await_store",
    "connect",
    "first_host",
    "gloo_group",
    "join",
    "meet",
    "place_from_environment",
    "serve",
]

if TYPE_CHECKING:  # torch's stubs have them at another place than the module
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
else:
    from torch.distributed import PrefixStore, Store, TCPStore

LOG = logging.getLogger(__name__)
RETRY_S = 0.05
PATIENCE_S = 60.0  # for a connection to the store
MEETING_S = 300.0  # for all ranks to meet: hosts read their programs from slow disks
TELL_S = 20.0  # between two words about who is missing
TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM: Final = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_FIRST_PORT, _PORTS = 16384, 16384  # below Linux's range of ports for outgoing connections


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank a process is, and where the store of all ranks is; known before anything is connected."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    attempt: int = 0  # restarts so far, as the launcher of this host counts them
    serves: bool = False  # whether this rank runs the store
    round: str = ""  # what all ranks of this attempt call it, where they had to agree on that (`meet`)
    local_size: int = 1  # ranks on this host
    cores: frozenset[int] = frozenset()  # that they have together; none: whoever started them has dealt them out

    @property
    def num_cores(self) -> int:
        """That this host's ranks have together, as far as this one knows."""
        return len(self.cores) or len(os.sched_getaffinity(0))

    @property
    def prefix(self) -> str:
        """Of an attempt's keys: whoever read an earlier one's would look for peers that are gone."""
        return f"wavetrain/{self.round or f'attempt_{self.attempt}'}"


@dataclass(frozen=True, kw_only=True)
class World:
    """A connected `Place`. The store's keys are this attempt's own."""

    place: Place
    store: Store
    progress: Progress
    given: bytearray | int  # where `give` puts its bytes: memory or a file number

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def local_rank(self) -> int:
        return self.place.local_rank

    def give(self, data: bytes) -> None:
        """Hand bytes of any length to whoever started this rank (`Outcome.results`); later bytes are appended."""
        if isinstance(self.given, bytearray):
            self.given.extend(data)
            return
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.given, rest) :]


def join(place: Place, *, progress: Progress, given: int) -> World:
    """Connect a place to the store of whoever started all ranks."""
    return World(place=place, store=connect(place), progress=progress, given=given)


def connect(place: Place) -> Store:
    """A connection of its own to the store, under this attempt's prefix."""
    return PrefixStore(place.prefix, _reach(place, serve=False))


def meet(place: Place, *, timeout_s: float = MEETING_S) -> World:
    """Connect to the store, which the first rank starts where no launcher has, and agree on this attempt's keys.

    A launcher may keep its store for all attempts, and each host counts restarts by itself: torchrun's agents not at
    all when a host comes or goes. So every process draws a number. Rank 0 answers each with its own, which is new with
    every attempt; nobody answers to numbers of processes that are gone.
    """
    if not place.serves:
        await_store(place)
    store = _reach(place, serve=place.serves)
    act = _receive if place.rank == 0 else _arrive
    agreed = act(PrefixStore("wavetrain/meeting", store), place, time.monotonic() + timeout_s)
    met = replace(place, round=agreed)
    own = PrefixStore(met.prefix, store)
    return World(place=met, store=own, progress=Progress(rank=place.rank), given=bytearray())


def _reach(place: Place, *, serve: bool) -> TCPStore:
    limit = timedelta(seconds=PATIENCE_S)
    return TCPStore(place.host, place.port, is_master=serve, wait_for_workers=False, timeout=limit)


def _receive(hall: Store, place: Place, until: float) -> str:
    """Rank 0: answer all others as they come, again where one died on its way and another came in its place."""
    own, answered = secrets.token_hex(8), dict[int, str]()
    away = list(range(1, place.size))
    told = time.monotonic() + TELL_S
    while True:
        away = [rank for rank in away if not hall.check([f"here/{own}/{rank}"])]
        if not away:
            return own
        for rank in away:
            number = hall.get(f"hello/{rank}").decode() if hall.check([f"hello/{rank}"]) else ""
            if number != answered.get(rank, ""):
                hall.set(f"answer/{number}", own)
                answered[rank] = number
        now = time.monotonic()
        if now > until:
            raise RunError(f"{_ranks_named(away)} did not come to {place.host}:{place.port}")
        if now > told:
            LOG.warning("waiting for %s of %d", _ranks_named(away), place.size)
            told = now + TELL_S
        time.sleep(RETRY_S)


def _arrive(hall: Store, place: Place, until: float) -> str:
    own = secrets.token_hex(8)
    try:
        hall.set(f"hello/{place.rank}", own)
        hall.wait([f"answer/{own}"], timedelta(seconds=until - time.monotonic()))
        agreed = hall.get(f"answer/{own}").decode()
        hall.set(f"here/{agreed}/{place.rank}", "")
    except RuntimeError as error:  # torch's DistError is one
        reason = str(error).partition("\n")[0]
        raise RunError(f"rank {place.rank}: did not meet rank 0 at {place.host}:{place.port}: {reason}") from None
    return agreed


def _ranks_named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if ranks[8:] else ""
    return f"rank{'s' if ranks[1:] else ''} {shown}{more}"


def await_store(place: Place, *, timeout_s: float = PATIENCE_S) -> None:
    """Return when the store answers, where another process starts it; torch's own attempts are loud and far between."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((place.host, place.port), timeout=timeout_s):
                return
        except OSError as error:
            if time.monotonic() > until:
                where, why = f"{place.host}:{place.port}", error.strerror or str(error)
                raise RunError(f"rank {place.rank}: no store at {where} for {timeout_s:.0f} s ({why})") from None
        time.sleep(RETRY_S)


def serve(place: Place, listener: socket.socket) -> Store:
    """Run the store at a socket that listens already; connections made before are answered from now on."""
    number = os.dup(listener.fileno())  # the store closes it
    store = TCPStore(place.host, place.port, is_master=True, wait_for_workers=False, master_listen_fd=number)
    return PrefixStore(place.prefix, store)


@contextmanager
def gloo_group(world: World, *, timeout_s: float) -> Iterator[None]:
    """All ranks' process group, over the interface that GLOO_SOCKET_IFNAME names (else the one the host name is on)."""
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=world.store, rank=world.rank, world_size=world.size, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def place_from_environment(environ: Mapping[str, str]) -> Place | None:
    """The place that torchrun's or else Slurm's variables state; None where neither has started this process."""
    if any(name in environ for name in TORCHRUN[:3]):
        return _torchrun(environ)
    if "SLURM_PROCID" in environ:
        return _slurm(environ)
    return None


def _torchrun(environ: Mapping[str, str]) -> Place:
    _all_set(environ, TORCHRUN, "torchrun")
    shared = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    rank, size, local_rank = _ranks(environ, *TORCHRUN[:3])
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        host=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT", least=1, most=65535),
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        serves=rank == 0 and not shared,
        local_size=_number(environ, "LOCAL_WORLD_SIZE", least=1, default=1),
        cores=_common_cores(),
    )


def _common_cores() -> frozenset[int]:
    """All of this host's; none where this process has been bound to some."""
    own = frozenset(os.sched_getaffinity(0))
    return own if len(own) == os.cpu_count() else frozenset()


def _slurm(environ: Mapping[str, str]) -> Place:
    _all_set(environ, SLURM, "srun")
    rank, size, local_rank = _ranks(environ, *SLURM)
    host = environ.get("MASTER_ADDR") or _first_of_nodes(environ)
    if "MASTER_PORT" in environ:
        port = _number(environ, "MASTER_PORT", least=1, most=65535)
    else:
        port = _FIRST_PORT + _number(environ, "SLURM_JOB_ID") % _PORTS
    attempt = _number(environ, "SLURM_RESTART_COUNT", default=0)
    return Place(rank=rank, size=size, local_rank=local_rank, host=host, port=port, attempt=attempt, serves=rank == 0)


def _all_set(environ: Mapping[str, str], names: tuple[str, ...], launcher: str) -> None:
    missing = [name for name in names if not environ.get(name, "").strip()]
    if missing:
        there = [name for name in names if name not in missing]
        rule = f"not set, though {', '.join(there)} {'is' if len(there) == 1 else 'are'}" if there else "is empty"
        remedy = f"start with {launcher}, or with --local N and without these variables"
        raise InputError(Problem(where=f"environment  {name}", rule=rule, remedy=remedy) for name in missing)


def _number(
    environ: Mapping[str, str], name: str, *, least: int = 0, most: int = 2**31, default: int | None = None
) -> int:
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        rule = f"must be a whole number from {least} to {most}" if text else "not set"
        raise InputError(Problem(where="environment", key=name, value=environ.get(name), rule=rule))
    return int(text)


def _ranks(environ: Mapping[str, str], rank_name: str, size_name: str, local_name: str) -> tuple[int, int, int]:
    rank, size, local = (_number(environ, name) for name in (rank_name, size_name, local_name))
    if rank >= size:
        rule = f"ranks count from 0, so it must be less than {size_name} ({size})"
        raise InputError(Problem(where="environment", key=rank_name, value=rank, rule=rule))
    if local > rank:
        rule = f"a rank's number on its host can't be above its number among all, {rank_name} ({rank})"
        raise InputError(Problem(where="environment", key=local_name, value=local, rule=rule))
    return rank, size, local


def _first_of_nodes(environ: Mapping[str, str]) -> str:
    name = next((name for name in _NODELISTS if environ.get(name)), "")
    if not name:
        raise InputError(Problem(where=f"environment  {_NODELISTS[0]}", rule="not set", remedy="start with srun"))
    host = first_host(environ[name])
    if host is None:
        rule = "is no list of hosts; they read like node1,node[03-07,9]"
        raise InputError(Problem(where="environment", key=name, value=environ[name], rule=rule))
    return host


def first_host(nodes: str) -> str | None:
    """The first host of a Slurm list: `node[03-07,9],gpu1` -> `node03`; several brackets are allowed."""
    pattern = r"(?:[A-Za-z0-9._-]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+"
    match = re.match(rf"({pattern})(?:,|$)", nodes.strip())
    return re.sub(r"\[([0-9]+)[^]]*\]", r"\1", match[1]) if match else None
