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
import os
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from wavetrain.base.codec import dumps, encode
from wavetrain.base.errors import InputError, RunError, one_line
from wavetrain.runtime.beside import PATIENCE_S, Beside, alive
from wavetrain.runtime.checkpoint import (
    Checkpoint,
    begin,
    clean,
    discard,
    keep_last,
    newest,
    opened,
    publish,
    published,
)
from wavetrain.runtime.inject import When, strike
from wavetrain.runtime.job import Job
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.logs import versions
from wavetrain.runtime.manifest import VALUE, Manifest, Shard, pack, unpack
from wavetrain.runtime.neighbours import Found, Neighbours
from wavetrain.runtime.tensorfile import Entry, common, write_shard
from wavetrain.runtime.world import World, connect

LOG = logging.getLogger(__name__)
FAILED = "failed: "  # a shard's facts are a mapping, so no rank can mean something else
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's
MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
FROM_MEMORY = "memory"  # where a run goes on from, if not from a checkpoint's path


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
            checkpoint.read_into(leaf.values, name, VALUE, leaf.place)
            state = {kind: checkpoint.read(name, kind, leaf.place) for kind in MOMENTS if name in moments[kind]}
            learner.set_optimizer_state(leaf, state, step=checkpoint.step)


def last_step(root: Path) -> int:
    """How far a directory's newest checkpoint is, by its name; 0 where there is none."""
    found = published(root)
    return int(found[0].name.rpartition("-")[2]) if found else 0


def manifest_of(job: Job, done: int, shards: tuple[Shard, ...]) -> Manifest:
    """Of the state after so many steps."""
    return Manifest(
        run=run_id(job),
        step=done,
        plan_hash=plan_hash(job),
        position={"step": done, "samples": done * job.plan.layout.global_batch},
        counters={"seed": job.seed},  # all random numbers are functions of it and of the step
        versions=versions(),
        shards=shards,
    )


def files_for(learner: Learner, manifest: Manifest) -> set[str]:
    """The shards that `restore` will read."""
    found = set()
    for leaf in learner.every_leaf():
        name = learner.ties.get(leaf.name, leaf.name)
        for kind in (VALUE, *MOMENTS):
            held = manifest.pieces.get(kind, {}).get(name, ())
            found |= {shard.file for shard, piece in held if all(common(piece.place, leaf.place))}
    return found


def memory_folder(job: Job) -> Path:
    """A run's folder in a host's memory. Beside other checkpoints it is another run, as it is for another user."""
    where = None if job.checkpoints is None else str(job.checkpoints.resolve())
    digest = hashlib.sha256(json.dumps([run_id(job), where, os.getuid()]).encode()).hexdigest()[:16]
    return (job.memory_dir or MEMORY) / f"wavetrain-{digest}"


def is_saved(job: Job) -> bool:
    """Whether a run that is killed can go on."""
    return job.checkpoints is not None or job.memory_every > 0


def _newest(job: Job, copy: Found | None) -> str:
    """Where the newest state of a run is; nothing where a run may begin. The disk is read only if it may be newer."""
    whole = copy if copy and copy.shards else None
    root, found = job.checkpoints, None
    if root is not None:
        clean(root)
        if whole and whole.copy.step >= last_step(root):
            return FROM_MEMORY
        try:
            found = newest(root, run=run_id(job))
        except InputError:
            if whole is None or published(root):  # of another run; bad ones are set aside now
                raise
    if whole and (found is None or found.step < whole.copy.step):
        return FROM_MEMORY
    if copy and found is None:
        told = f"of the copy in memory after {copy.copy.step} steps not all is left, and there is no checkpoint"
        raise RunError(f"{told}; to start over remove {memory_folder(job)} on every host")
    return "" if found is None else str(found.path)


class Saver:
    """Saves the state of one rank beside its steps: to checkpoints, which rank 0 publishes, and to memory."""

    def __init__(self, job: Job, world: World, learner: Learner) -> None:
        """All ranks call this together."""
        self._job, self._world, self._learner = job, world, learner
        self._store = connect(world.place)  # its own: a thread waits on it
        self._store.set_timeout(timedelta(seconds=PATIENCE_S))
        self._disk, self._memory = Beside(world.progress), Beside(world.progress)
        self._known: set[Path] = set()  # checkpoints that this process has published
        self._neighbours: Neighbours | None = None
        if job.memory_every > 0:
            has_shard = next(learner.counted_leaves(), None) is not None
            self._neighbours = Neighbours(world, memory_folder(job), has_shard=has_shard, timeout_s=job.timeout_s)

    def resume(self) -> int:
        """The step to go on with: that of the newest checkpoint or copy in memory that is good, or 0. All call this."""
        return alive(self._world.progress, self._resume)  # files are verified

    def _resume(self) -> int:
        job, world, neighbours = self._job, self._world, self._neighbours
        copy = neighbours.newest() if neighbours else None
        if world.rank == 0:
            try:
                self._store.set("resume", _newest(job, copy))
            except InputError as error:  # a report tells one line of a rank's error
                raise RunError(one_line(error)) from None
        path = self._store.get("resume").decode()
        strike(job.faults, When.LOAD, rank=world.rank, attempt=world.place.attempt)
        if not path:
            return 0
        if path == FROM_MEMORY and neighbours:
            folder, step, shards = neighbours.bring(
                copy, lambda *known: files_for(self._learner, manifest_of(job, *known))
            )
            if step >= job.steps:
                raise RunError(f"{folder}: {step} steps are done already, the run has {job.steps}")
            checkpoint = Checkpoint(folder, manifest_of(job, step, shards))
        else:
            checkpoint = opened(Path(path))
        restore(self._learner, checkpoint)
        if world.rank == 0:
            LOG.info("goes on after %d steps, from %s", checkpoint.step, checkpoint.path)
        return checkpoint.step

    def after(self, done: int) -> None:
        """Save the state after so many steps, if that is due; the save before is finished first."""
        job, is_last = self._job, done == self._job.steps
        to_disk = job.checkpoints is not None and (is_last or _is_due(done, job.save_every))
        to_memory = self._neighbours is not None and not is_last and _is_due(done, job.memory_every)
        if not (to_disk or to_memory):
            return
        for due, work in ((to_memory, self._memory), (to_disk, self._disk)):
            if due:
                work.finish()
        entries = entries_of(self._learner)
        if self._neighbours is not None and to_memory:
            reached = partial(self._strike, done=done)
            self._memory.start(f"copy-{done}", partial(self._neighbours.save, done, entries, reached=reached))
        if job.checkpoints is not None and to_disk:
            self._disk.start(f"save-{done}", partial(self._write, job.checkpoints, done, entries))

    def finish(self) -> None:
        """Wait for what was begun; an error of it is raised here."""
        self._memory.finish()
        self._disk.finish()

    def end(self) -> None:
        """The run ended well: what it has in memory is of no more use. All ranks call this."""
        self.finish()
        if self._neighbours is not None:
            self._neighbours.end()

    def _write(self, root: Path, done: int, entries: list[Entry]) -> None:
        rank, key = self._world.rank, f"checkpoint/{done}"
        if rank == 0:
            self._store.set(f"{key}/folder", str(begin(root, step=done)))
        folder = Path(self._store.get(f"{key}/folder").decode())
        self._strike(When.SAVE, done)
        failed: RunError | None = None
        try:
            told = pack(write_shard(folder, rank, entries)) if entries else ""
        except RunError as error:  # a full disk, for instance
            told, failed = f"{FAILED}{error}", error
        self._store.set(f"{key}/{rank}", told)
        if rank == 0:
            try:
                self._publish(root, folder, done)
            except BaseException:
                with suppress(RunError):  # what is told is why it failed, not what is left of it
                    discard(folder)
                self._store.set(f"{key}/done", "")
                raise
            if done == self._job.steps:
                self._store.set(f"{key}/done", "")
        elif failed or done == self._job.steps:  # the run ends with it: not before rank 0 has cleared up
            self._store.wait([f"{key}/done"])
        if failed:
            raise failed

    def _publish(self, root: Path, folder: Path, done: int) -> None:
        """On rank 0, of what all have written; the error of any of them is this one's."""
        keys = [f"checkpoint/{done}/{rank}" for rank in range(self._world.size)]
        told = [self._store.get(key).decode() for key in keys]
        for key in (*keys, f"checkpoint/{done}/folder"):  # all have read it; long runs would fill the store
            self._store.delete_key(key)
        if failed := next((one for one in told if one.startswith(FAILED)), None):
            raise RunError(failed.removeprefix(FAILED))
        self._strike(When.PUBLISH, done)
        shards = tuple(unpack(one) for one in told if one)
        self._known.add(publish(folder, manifest_of(self._job, done, shards)))
        keep_last(root, self._job.keep, known=self._known)

    def _strike(self, when: When, done: int) -> None:
        strike(self._job.faults, when, rank=self._world.rank, attempt=self._world.place.attempt, step=done)


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
