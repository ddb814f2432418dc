"""A rank that loads holds its own pieces and little more, as the kernel counts it."""

import ctypes
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.runtime.plans import small_model

from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.commands.train_run import job_of
from wavetrain.plan import Choice, Layout, Plan, Precision
from wavetrain.runtime.checkpoint import opened, step_name
from wavetrain.runtime.imported import SINGLE, load_values
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.saving import restore
from wavetrain.runtime.trainer import train
from wavetrain.runtime.world import gloo_group

RANKS = 2
MORE = 48 << 20  # what is read at once, and what allocators keep of it


@pytest.fixture(scope="module")
def plan():
    """124 MB of parameters, all sharded."""
    return Plan(
        model=small_model(blocks=4, tied=False, family="llama", hidden=512, heads=8, vocab=20_000, seq_len=8),
        cluster=load_cluster("dgx-h100:1").part(RANKS),
        layout=Layout(global_batch=RANKS, microbatch=1, dp=RANKS),
        cut=(4,),
        seq_len=8,
        choice=Choice(RANKS),
        precision=Precision(compute=DType.FP32, products=DType.FP32, state_bytes=8),
    )


def counted(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def measured(job, load, *, again=False):
    """By rank: bytes of its parameters, and the most that was held beyond what it held before.

    Libraries' pages count when they are first touched, so with `again` it was loaded before.
    """

    def work(world):
        with gloo_group(world, timeout_s=60):
            learner = Learner(job, world)
            own = sum(leaf.values.nbytes for leaf in learner.every_leaf())
            if again:
                load(learner)
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
            before = counted("VmRSS:")
            load(learner)
            world.give(json.dumps([own, counted("VmHWM:") - before]).encode())

    return [json.loads(result) for result in run_local(work, RANKS).check().results]


def test_a_checkpoint_is_restored_in_the_memory_of_its_moments(plan, tmp_path):
    job = job_of(plan, steps=1, checkpoints=tmp_path)

    def save(world):
        train(job, world)

    run_local(save, RANKS).check()
    whole = 4 * plan.model.num_parameters
    for own, more in measured(job, lambda learner: restore(learner, opened(tmp_path / step_name(1)))):
        assert own == pytest.approx(whole / RANKS, rel=0.01)
        assert 2 * own * 0.9 < more < 2 * own + MORE / 2 < 2 * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_loaded_in_no_memory_of_its_own(plan, tmp_path, dtype):
    job = job_of(plan, steps=1)
    values = {p.name: torch.zeros(p.shape, dtype=dtype) for p in plan.model.parameters()}
    save_file(values, tmp_path / SINGLE)
    del values
    load = lambda learner: load_values(tmp_path, learner.every_leaf(), job.parts())  # noqa: E731
    for own, more in measured(job, load, again=True):
        assert more < MORE < own
