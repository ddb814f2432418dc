"""Runs that save what they have: plans of many layouts, how they are run, and what their checkpoints have."""

import torch
from tests.runtime.plans import small_model

from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.commands.train_run import job_of, rows_of
from wavetrain.plan import Choice, Layout, OperatorChoice, Plan, Precision
from wavetrain.plan.check import check
from wavetrain.plan.plan import num_stages
from wavetrain.runtime.checkpoint import newest
from wavetrain.runtime.inject import Fault, Kinds
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.learn import Rate
from wavetrain.runtime.report import Limits
from wavetrain.runtime.trainer import train

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


def kill(step, when, rank, attempt=0):
    return Fault(kind=Kinds.KILL, rank=rank, step=step, when=when, attempt=attempt)
