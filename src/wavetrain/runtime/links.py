"""How messages between the stages of a run travel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wavetrain.base.errors import RunError
from wavetrain.runtime.board import kernel
from wavetrain.runtime.executor import Boundary
from wavetrain.runtime.grid import Grid
from wavetrain.runtime.job import Job
from wavetrain.runtime.samehost import open_same_host
from wavetrain.runtime.transport import Grouped, Transport, links_of, tagged
from wavetrain.runtime.world import Store, World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore
else:
    from torch.distributed import PrefixStore


def carrier(job: Job, world: World, grid: Grid | None, boundary: Boundary) -> Transport:
    """Through memory where all ranks are on one host, else over gloo. All ranks call this together."""
    near = job.transport != "gloo" and on_one_host(world)
    if job.transport == "memory" and not near:
        raise RunError("--transport memory: the ranks are not all on one host; gloo goes over the network")
    actions = job.actions
    rank = world.rank if grid is None else grid.stage_rank
    if near:
        store: Store = world.store if grid is None else PrefixStore(f"pipeline/{grid.replica}/{grid.part}", world.store)
        most, crowded = boundary.most_bytes, world.size > world.place.num_cores
        return open_same_host(rank, actions.num_ranks, store, links_of(actions), most_bytes=most, crowded=crowded)
    route = tagged(actions.placement.num_stages, actions.num_microbatches)
    return Grouped(rank, route, ranks=None if grid is None else grid.pipeline)


def on_one_host(world: World) -> bool:
    """Whether all ranks run under one kernel and have one network: a virtual host has its own."""
    world.store.set(f"host/{world.rank}", own_host())
    hosts = {world.store.get(f"host/{rank}") for rank in range(world.size)}
    return len(hosts) == 1 and b"" not in hosts


def own_host() -> str:
    """Equal for ranks that share memory and a network; empty where that is not known."""
    try:
        return kernel() and kernel() + str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""
