"""Runs that are killed anywhere go on to the same end; any layout goes on from any other's checkpoint."""

import json
import os
import random
from itertools import product

import pytest
import torch
from tests.runtime.near import at
from tests.runtime.plans import small_model

from wavetrain.base.errors import InputError
from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.commands.train_run import job_of, rows_of
from wavetrain.plan import Choice, Layout, OperatorChoice, Plan, Precision
from wavetrain.plan.check import check
from wavetrain.plan.plan import num_stages
from wavetrain.runtime.checkpoint import newest, published
from wavetrain.runtime.inject import DURING, Fault, Kinds, When, parse_fault
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.learn import Rate
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.report import Cause, Limits
from wavetrain.runtime.saving import MOMENTS, VALUE, restore
from wavetrain.runtime.trainer import train
from wavetrain.runtime.world import gloo_group

SOAK = "WAVETRAIN_SOAK" in os.environ
BLOCKS, STEPS, EVERY = 4, 6, 2
RATE = Rate(peak=1e-2, schedule="cosine", warmup=1, steps=STEPS)
QUICK = Limits(floor_s=20.0)


def plan_for(*, tied=True, choice=None, choices=(), **degrees):
    layout = Layout(global_batch=8, **{"microbatch": 1, **degrees})
    stages = num_stages(layout)
    plan = Plan(
        model=small_model(blocks=BLOCKS, tied=tied, family="llama", hidden=16, vocab=30, seq_len=8),
        cluster=load_cluster("dgx-h100:1").part(layout.num_devices),
        layout=layout,
        cut=tuple(BLOCKS // stages + (stage < BLOCKS % stages) for stage in range(stages)),
        seq_len=8,
        choice=choice or Choice(),
        choices=tuple(choices),
        precision=Precision(compute=DType.FP32, products=DType.FP32, state_bytes=8),
    )
    assert not check(plan), check(plan)
    return plan


UP = "model.layers.{}.mlp.up_proj"
LAYOUTS = {
    "one": {},
    "replicas": {"dp": 2},
    "shards": {"dp": 4, "choice": Choice(4)},
    "groups, kept": {"dp": 4, "choice": Choice(2, keep=True)},
    "slices": {"dp": 2, "choices": [OperatorChoice("decoder", UP, Choice(2, slices=4))], "choice": Choice(2)},
    "parts": {"tp": 4},
    "parts along the sequence": {"tp": 2, "dp": 2, "sequence_parallel": True, "choice": Choice(2)},
    "pipeline": {"pp": 2, "schedule": "1f1b"},
    "wave": {"pp": 2, "schedule": "wave", "waves": 1, "dp": 2, "choice": Choice(2)},
    "split wave": {"pp": 2, "schedule": "wave-zb", "waves": 1},
    "two copies": {"pp": 2, "schedule": "chimera"},
    "everything": {"pp": 2, "dp": 2, "tp": 2, "schedule": "wave", "waves": 1, "choice": Choice(2)},
}


def job_for(plan, root, *, steps=STEPS, faults=(), **more):
    return job_of(plan, steps=steps, rate=RATE, clip=1.0, checkpoints=root, save_every=EVERY, faults=faults, **more)


def run(job, *, attempt=0):
    def work(world):
        train(job, world)

    return run_local(work, job.num_ranks, limits=QUICK, actions=rows_of(job), attempt=attempt)


def whole(root):
    """Everything that the newest checkpoint has, in full."""
    found = newest(root)
    everything = {}
    for kind in found.kinds:
        for name in found.names(kind):
            place = tuple(((0, size),) for size in found.shape(name))
            everything[kind, name] = found.read(name, kind, place)
    return found.step, everything


def assert_same(root, expected):
    step, found = whole(root)
    assert step == expected[0]
    assert found.keys() == expected[1].keys()
    for key, value in expected[1].items():
        assert torch.equal(found[key], value), key


# --- killed anywhere ---

WAVE = LAYOUTS["wave"]


def kill(step, when, rank, attempt=0):
    return Fault(kind=Kinds.KILL, rank=rank, step=step, when=when, attempt=attempt)


KILLS = [
    *(kill(*point) for point in product((1, 3, 5), (*DURING, When.OPTIMIZER), range(4))),
    *(kill(*point) for point in product((2, 4, 6), (When.SAVE,), range(4))),
    *(kill(step, When.PUBLISH, 0) for step in (2, 4, 6)),
    *(kill(0, When.START, rank) for rank in range(4)),
]
AGAIN = [kill(0, when, rank, attempt=1) for when, rank in product((When.START, When.LOAD), range(4))]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("uninterrupted")
    run(job_for(plan_for(**WAVE), root)).check()
    return whole(root)


def sample(cases, count):
    return cases if SOAK else random.Random(8).sample(cases, count)


@pytest.mark.parametrize("fault", sample(KILLS, 4), ids=lambda f: f"{f.when}-{f.step}-{f.rank}")
def test_a_run_that_is_killed_goes_on_to_the_same_end(fault, tmp_path, uninterrupted):
    job = job_for(plan_for(**WAVE), tmp_path, faults=(fault,))
    first = run(job)
    assert first.report is not None, "nothing happened"
    assert (first.report.culprit, first.report.cause) == (fault.rank, Cause.KILLED)
    run(job, attempt=1).check()
    assert_same(tmp_path, uninterrupted)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("fault", sample(AGAIN, 1), ids=lambda f: f"{f.when}-{f.rank}")
def test_a_recovery_that_is_killed_is_repeated(fault, tmp_path, uninterrupted):
    before = kill(3, When.BACKWARD, 2)
    job = job_for(plan_for(**WAVE), tmp_path, faults=(before, fault))
    for attempt, culprit in enumerate((2, fault.rank)):
        failed = run(job, attempt=attempt)
        assert failed.report is not None
        assert failed.report.culprit == culprit
    run(job, attempt=2).check()
    assert_same(tmp_path, uninterrupted)


# --- from any layout to any other ---

PAIRS = [(a, b) for a, b in product(LAYOUTS, LAYOUTS) if a != b]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    roots = {}

    def save(name):
        if name not in roots:
            roots[name] = tmp_path_factory.mktemp("saved")
            run(job_for(plan_for(**LAYOUTS[name]), roots[name], steps=2)).check()
        return roots[name]

    return save


@pytest.mark.parametrize(("source", "target"), sample(PAIRS, 5))
def test_any_layout_goes_on_from_any_other(source, target, saved):
    """Parameters and moments are those that were saved, to the bit."""
    root = saved(source)
    _, expected = whole(root)
    job = job_for(plan_for(**LAYOUTS[target]), root, steps=2)

    def work(world):
        with gloo_group(world, timeout_s=60):
            learner = Learner(job, world)
            restore(learner, newest(root))
            for leaf in learner.every_leaf():
                name = learner.ties.get(leaf.name, leaf.name)
                state = {VALUE: leaf.values, **learner.optimizer_state(leaf)}
                for kind in (VALUE, *MOMENTS):
                    if kind in state:
                        assert torch.equal(state[kind], at(expected[kind, name], leaf.place)), (kind, leaf.key)

    run_local(work, job.num_ranks).check()


def test_another_layout_goes_on_with_the_same_losses(tmp_path):
    """Four ranks save, one goes on: the losses are those of one all the time, as near as sums in another order are."""
    losses = {}
    for name, first in (("one", None), ("wave", "wave")):
        root = tmp_path / name
        if first:
            run(job_for(plan_for(**LAYOUTS[first]), root, steps=4)).check()
        job = job_for(plan_for(), root)

        def work(world, job=job):
            records = train(job, world)
            world.give(json.dumps(records[0].losses).encode())

        outcome = run_local(work, 1).check()
        losses[name] = eval(outcome.results[0])
    assert losses["wave"] == pytest.approx(losses["one"][4:], rel=1e-5)


# --- what is refused ---


def test_another_runs_checkpoints_are_refused(tmp_path):
    run(job_for(plan_for(), tmp_path, steps=2)).check()
    outcome = run(job_for(plan_for(), tmp_path, seed=1))
    assert outcome.report is not None
    assert "is of another run" in outcome.report.text


def test_a_bad_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path):
    run(job_for(plan_for(), tmp_path, steps=4)).check()
    newest_one, before = published(tmp_path)
    shard = next(path for path in newest_one.iterdir() if path.suffix == ".safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    shard.write_bytes(data)
    run(job_for(plan_for(), tmp_path)).check()
    names = {path.name for path in tmp_path.iterdir()}
    assert before.name == "step-00000002"
    assert names == {"step-00000004", "step-00000006", "bad-step-00000004-1"}


def test_a_directory_that_cannot_be_written_ends_the_run_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    outcome = run(job_for(plan_for(), tmp_path / "file"))
    assert outcome.report is not None
    assert str(tmp_path / "file") in outcome.report.text


@pytest.mark.parametrize("text", ["kill", "kil:1:2:save", "kill:1:2:sometimes", "kill:x:2:save", "kill:1:2:save:-1"])
def test_faults_are_read_strictly(text):
    with pytest.raises(InputError):
        parse_fault(text, where="--inject")
    assert parse_fault("stop:3:7:publish:2", where="") == Fault(
        kind=Kinds.STOP, rank=3, step=7, when=When.PUBLISH, attempt=2
    )
