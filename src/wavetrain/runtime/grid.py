"""`Grid`: where a rank is along each axis of a layout, and the groups it shares with others: one DeviceMesh.

Ranks are numbered as `Layout` says: tp innermost, then dp, pp; with `pp_inside` tp, pp, dp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wavetrain.base.errors import InputError, Problem
from wavetrain.plan.layout import Layout
from wavetrain.plan.plan import Plan

REPLICATE, SHARD = "replicate", "shard"


@dataclass(frozen=True)
class Grid:
    """A rank's place: which replica of the model, which rank of its pipeline, which part of every cut operator."""

    layout: Layout
    rank: int
    replica: int
    stage_rank: int
    part: int
    pipeline: tuple[int, ...]  # ranks that run the other stages of this replica and part, in order
    meshes: Mapping[
        int, DeviceMesh
    ]  # by how many replicas share the shards of a parameter; 0: replicas in one dimension

    @property
    def pp(self) -> DeviceMesh:
        return self.meshes[0]["pp"]

    @property
    def dp(self) -> DeviceMesh:
        """All replicas of what this rank has."""
        return self.meshes[0]["dp"]

    @property
    def tp(self) -> DeviceMesh:
        return self.meshes[0]["tp"]

    def sharding(self, shard: int) -> DeviceMesh:
        """Replicas as FSDP2 wants them: neighbours share a group of `shard`, groups are replicas of each other."""
        if shard == self.layout.dp:
            return self.meshes[shard][SHARD]
        return self.meshes[shard][REPLICATE, SHARD]


def open_grid(plan: Plan, *, rank: int, size: int, device: str = "cpu") -> Grid:
    """The grid of a plan; all ranks call this together, with the default process group made."""
    layout = plan.layout
    check_world(layout, size=size, where=f"rank {rank}")
    shards = {choice.shard for choice in (plan.choice, *(item.choice for item in plan.choices))}
    replica, stage_rank, part = place_of(layout, rank)
    return Grid(
        layout=layout,
        rank=rank,
        replica=replica,
        stage_rank=stage_rank,
        part=part,
        pipeline=tuple(rank_of(layout, replica=replica, stage_rank=s, part=part) for s in range(layout.pp)),
        meshes=_meshes(layout, shards, device),
    )


def check_world(layout: Layout, *, size: int, where: str) -> None:
    """A plan is for a number of ranks, and for no other."""
    if layout.num_devices != size:
        degrees = f"pp {layout.pp} x dp {layout.dp} x tp {layout.tp}" + (f" x cp {layout.cp}" if layout.cp > 1 else "")
        rule = f"the plan is for {layout.num_devices} ranks ({degrees}), this run has {size}"
        raise InputError(Problem(where=where, key="layout", rule=rule, legal=(str(layout.num_devices),)))


def place_of(layout: Layout, rank: int) -> tuple[int, int, int]:
    """Replica, rank in the pipeline and part of a rank."""
    names, shape = _axes(layout)
    place = dict(zip(names, (int(i) for i in np.unravel_index(rank, shape)), strict=True))
    return place["dp"], place["pp"], place["tp"]


def rank_of(layout: Layout, *, replica: int, stage_rank: int, part: int) -> int:
    """The rank at a place."""
    names, shape = _axes(layout)
    place = {"dp": replica, "pp": stage_rank, "tp": part}
    return int(np.ravel_multi_index([place[name] for name in names], shape))


def _axes(layout: Layout) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names = ("dp", "pp", "tp") if layout.pp_inside else ("pp", "dp", "tp")
    return names, tuple(getattr(layout, name) for name in names)


def _meshes(layout: Layout, shards: Iterable[int], device: str) -> dict[int, DeviceMesh]:
    """The same on all ranks, made in the same order."""
    names, shape = _axes(layout)
    meshes = {0: init_device_mesh(device, shape, mesh_dim_names=names)}
    for shard in sorted(set(shards)):
        sizes = {"dp": (layout.dp // shard, shard), "pp": (layout.pp,), "tp": (layout.tp,)}
        parts = {"dp": (REPLICATE, SHARD), "pp": ("pp",), "tp": ("tp",)}
        cut = tuple(size for name in names for size in sizes[name])
        meshes[shard] = init_device_mesh(
            device, cut, mesh_dim_names=tuple(part for name in names for part in parts[name])
        )
    return meshes
