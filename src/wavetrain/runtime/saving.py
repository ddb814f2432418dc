"""A run's state on disk and back: which pieces a rank writes and reads, and when.

A checkpoint knows parameters by their names and no layout: each piece says where in its whole it is, so a run goes on
with any other number of ranks. The position in the data, the learning rate and all random numbers are functions of the
step. Of equal copies on all ranks one is written. Saving happens beside the next steps: values are copied first, so
what is stored is what they were.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from pathlib import Path

import torch

from wavetrain.base.codec import dumps, encode
from wavetrain.base.errors import InputError, RunError
from wavetrain.runtime.checkpoint import Checkpoint, begin, clean, keep_last, newest, opened, publish, published
from wavetrain.runtime.inject import When, strike
from wavetrain.runtime.job import Job
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.logs import versions
from wavetrain.runtime.manifest import Manifest, Shard, pack, unpack
from wavetrain.runtime.tensorfile import Entry, write_shard
from wavetrain.runtime.world import World, connect

LOG = logging.getLogger(__name__)
VALUE = "value"
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's


def run_id(job: Job) -> str:
    """What a run is, whatever its layout and however long it goes on: model, batch, seed and data."""
    plan = job.plan
    data = None if job.data is None else [job.data.name, job.data.stat().st_size]
    shapes = sorted([p.name, list(p.shape)] for p in plan.model.parameters())
    said = [shapes, plan.layout.global_batch, plan.seq_len, job.seed, data]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def plan_hash(job: Job) -> str:
    """Of the layout that saved, for whoever asks; loading does not."""
    return hashlib.sha256(dumps(encode(job.plan)).encode()).hexdigest()[:16]


def entries_of(learner: Learner) -> list[Entry]:
    """Copies of what this rank is to write: values and the optimizer's moments."""
    found = []
    for leaf in learner.counted_leaves():
        state = learner.optimizer_state(leaf)
        tensors = {VALUE: leaf.values} | {kind: state[kind] for kind in MOMENTS if kind in state}
        found += [
            Entry(leaf.name, kind, leaf.shape, leaf.place, tensor.detach().clone()) for kind, tensor in tensors.items()
        ]
    return found


def restore(learner: Learner, checkpoint: Checkpoint) -> None:
    """Give a rank its pieces of everything that was saved; nothing else is read."""
    moments = {kind: set(checkpoint.names(kind)) for kind in MOMENTS}
    with torch.no_grad():
        for leaf in learner.every_leaf():
            name = learner.ties.get(leaf.name, leaf.name)
            leaf.values.copy_(checkpoint.read(name, VALUE, leaf.place))
            state = {kind: checkpoint.read(name, kind, leaf.place) for kind in MOMENTS if name in moments[kind]}
            learner.set_optimizer_state(leaf, state, step=checkpoint.step)


def last_step(root: Path) -> int:
    """How far a directory's newest checkpoint is, by its name; 0 where there is none."""
    found = published(root)
    return int(found[0].name.rpartition("-")[2]) if found else 0


def resume(job: Job, world: World, learner: Learner) -> int:
    """The step to go on with: that of the newest good checkpoint, or 0. All ranks call this together."""
    if job.checkpoints is None:
        return 0
    if world.rank == 0:
        try:
            clean(job.checkpoints)
            found = newest(job.checkpoints, run=run_id(job))
        except InputError as error:  # a report tells one line of a rank's error
            raise RunError(": ".join(line.strip() for line in str(error).splitlines())) from None
        world.store.set("resume", "" if found is None else str(found.path))
    path = world.store.get("resume").decode()
    strike(job.faults, When.LOAD, rank=world.rank, attempt=world.place.attempt)
    if not path:
        return 0
    checkpoint = opened(Path(path))
    restore(learner, checkpoint)
    if world.rank == 0:
        LOG.info("goes on after %d steps, from %s", checkpoint.step, path)
    return checkpoint.step


class Saver:
    """Writes checkpoints of one rank beside its steps; rank 0 publishes them."""

    def __init__(self, job: Job, world: World, learner: Learner) -> None:
        assert job.checkpoints is not None
        self._job, self._world, self._learner, self._root = job, world, learner, job.checkpoints
        self._store = connect(world.place)  # its own: a thread waits on it
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def after(self, done: int) -> None:
        """Save the state after so many steps, if that is due; the save before is finished first."""
        every = self._job.save_every
        if done != self._job.steps and not (every and done % every == 0):
            return
        self.finish()
        entries = entries_of(self._learner)
        self._thread = threading.Thread(target=self._guarded, args=(done, entries), name=f"save-{done}")
        self._thread.start()

    def finish(self) -> None:
        """Wait for what was begun; an error of it is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _guarded(self, done: int, entries: list[Entry]) -> None:
        try:
            self._write(done, entries)
        except BaseException as error:
            self._failed = error

    def _write(self, done: int, entries: list[Entry]) -> None:
        rank, key = self._world.rank, f"checkpoint/{done}"
        if rank == 0:
            self._store.set(f"{key}/folder", str(begin(self._root, step=done)))
        folder = Path(self._store.get(f"{key}/folder").decode())
        self._strike(When.SAVE, done)
        shard = write_shard(folder, rank, entries) if entries else None
        self._store.set(f"{key}/{rank}", "" if shard is None else pack(shard))
        if rank == 0:
            told = [self._store.get(f"{key}/{other}").decode() for other in range(self._world.size)]
            shards = tuple(unpack(one) for one in told if one)
            self._strike(When.PUBLISH, done)
            publish(folder, self._manifest(done, shards))
            keep_last(self._root, self._job.keep)
            self._store.set(f"{key}/published", "")
        elif done == self._job.steps:  # the run ends with it
            self._store.wait([f"{key}/published"])

    def _manifest(self, done: int, shards: tuple[Shard, ...]) -> Manifest:
        job = self._job
        return Manifest(
            run=run_id(job),
            step=done,
            plan_hash=plan_hash(job),
            position={"step": done, "samples": done * job.plan.layout.global_batch},
            counters={"seed": job.seed},  # all random numbers are functions of it and of the step
            versions=versions(),
            shards=shards,
        )

    def _strike(self, when: When, done: int) -> None:
        strike(self._job.faults, when, rank=self._world.rank, attempt=self._world.place.attempt, step=done)
