"""A run of 30 steps on four ranks, a wave over sharded operators, killed at any point: it ends as if nothing had been.

Every kill names its culprit and leaves no process and no file. Each sample is used once by what becomes of the run:
steps that were done after the checkpoint it goes on from are done again, and do not count.
"""

import json
import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.saved import QUICK, UP, assert_same, kill, plan_for, whole
from tests.soak import sample

from wavetrain.commands.train_run import job_of, rows_of
from wavetrain.plan import Choice, OperatorChoice
from wavetrain.runtime.data import write_dataset
from wavetrain.runtime.inject import DURING, When
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.learn import Rate
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.report import Cause
from wavetrain.runtime.trainer import train

STEPS, EVERY, RANKS, BATCH, VOCAB, LENGTH = 30, 5, 4, 8, 30, 8
RATE = Rate(peak=1e-2, schedule="cosine", warmup=1, steps=STEPS)
WAVE = {
    "pp": 2,
    "schedule": "wave",
    "waves": 1,
    "dp": 2,
    "microbatch": 2,
    "choices": [OperatorChoice("decoder", UP, Choice(2)), OperatorChoice("head", "*", Choice(2))],
}
SAVES = range(EVERY, STEPS + 1, EVERY)


PHASES = (*DURING, When.OPTIMIZER)
POINTS = [  # every rank in every step, in one phase after another: each rank in each of them seven times or more
    *(kill(step, PHASES[(step + rank) % 4], rank) for step, rank in product(range(STEPS), range(RANKS))),
    *(kill(*point) for point in product(SAVES, (When.SAVE,), range(RANKS))),
    *(kill(step, When.PUBLISH, 0) for step in SAVES),
    *(kill(0, When.START, rank) for rank in range(RANKS)),
]
AGAIN = [
    *(kill(0, when, rank, attempt=1) for when, rank in product((When.START, When.LOAD), range(RANKS))),
    *(kill(step, When.BACKWARD, rank, attempt=1) for step, rank in product((10, 12, 17), range(RANKS))),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """As many samples as the run uses; the first two tokens of each are its number."""
    file = tmp_path_factory.mktemp("data") / "tokens.bin"
    numbers = np.arange(STEPS * BATCH)
    tokens = np.random.default_rng(1).integers(VOCAB, size=(len(numbers), LENGTH))
    tokens[:, 0], tokens[:, 1] = numbers // VOCAB, numbers % VOCAB
    write_dataset(file, np.append(tokens.ravel(), 0), vocab=VOCAB)
    return file


def job_for(root, data, faults=()):
    more = {"rate": RATE, "clip": 1.0, "checkpoints": root / "kept", "save_every": EVERY, "data": data}
    return job_of(plan_for(**WAVE), steps=STEPS, faults=faults, **more)


def run(job, root, attempt):
    """One attempt; what each rank has finished with is in `used-ATTEMPT-RANK`."""

    def work(world):
        batch, step = Learner._batch, Learner.step
        numbers = []

        def remembered(self, number):
            found = batch(self, number)
            rows = [row for tokens in found.tokens.values() for row in tokens.tolist()]
            numbers[:] = [first * VOCAB + second for first, second, *_ in rows]
            return found

        def noted(self, number):
            done = step(self, number)
            with (root / f"used-{attempt}-{self.grid.replica}-{self.grid.stage_rank}").open("a") as stream:
                stream.write(json.dumps([number, numbers]) + "\n")
            return done

        Learner._batch, Learner.step = remembered, noted
        train(job, world)

    return run_local(work, job.num_ranks, limits=QUICK, actions=rows_of(job), attempt=attempt)


def check_samples(root, attempts):
    """Every sample once, and in each step the same ones on all ranks of a replica."""
    for stage_rank in range(2):
        counted = {}  # by step: the samples of each replica
        for attempt in range(attempts):
            files = [root / f"used-{attempt}-{replica}-{stage_rank}" for replica in range(2)]
            lines = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
            first = min((step for step, _ in lines), default=STEPS)
            counted = {step: used for step, used in counted.items() if step < first}
            for step, used in lines:
                counted.setdefault(step, []).extend(used)
        assert sorted(counted) == list(range(STEPS))
        assert all(len(used) == BATCH for used in counted.values())
        assert sorted(number for used in counted.values() for number in used) == list(range(STEPS * BATCH))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("uninterrupted")
    run(job_for(root, data), root, 0).check()
    check_samples(root, 1)
    return whole(root / "kept")


def check_end(root, attempts, expected):
    assert_same(root / "kept", expected)
    check_samples(root, attempts)
    assert not [path for path in (root / "kept").iterdir() if path.name.startswith(".")]
    assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.mark.parametrize("fault", sample(POINTS, 2), ids=lambda f: f"{f.when}-{f.step}-{f.rank}")
def test_a_run_that_is_killed_goes_on_to_the_same_end(fault, tmp_path, data, uninterrupted):
    job = job_for(tmp_path, data, (fault,))
    first = run(job, tmp_path, 0)
    assert first.report is not None, "nothing happened"
    assert (first.report.culprit, first.report.cause) == (fault.rank, Cause.KILLED)
    run(job, tmp_path, 1).check()
    check_end(tmp_path, 2, uninterrupted)


@pytest.mark.parametrize("fault", sample(AGAIN, 1), ids=lambda f: f"{f.when}-{f.step}-{f.rank}")
def test_a_recovery_that_is_killed_is_repeated(fault, tmp_path, data, uninterrupted):
    job = job_for(tmp_path, data, (kill(12, When.BACKWARD, 2), fault))
    for attempt, culprit in enumerate((2, fault.rank)):
        failed = run(job, tmp_path, attempt)
        assert failed.report is not None
        assert (failed.report.culprit, failed.report.cause) == (culprit, Cause.KILLED)
    run(job, tmp_path, 2).check()
    check_end(tmp_path, 3, uninterrupted)
