"""What a run saves: any layout goes on from any other's checkpoint, and every run from its own."""

import json
from itertools import product

import pytest
import torch
from tests.runtime.near import at
from tests.runtime.saved import LAYOUTS, job_for, plan_for, run, whole
from tests.soak import sample

from wavetrain.base.errors import InputError
from wavetrain.runtime.checkpoint import newest, published
from wavetrain.runtime.inject import Fault, Kinds, When, parse_fault
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.saving import MOMENTS, VALUE, restore
from wavetrain.runtime.trainer import train
from wavetrain.runtime.world import gloo_group

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


@pytest.mark.parametrize(("source", "target"), sample(PAIRS, 3))
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
