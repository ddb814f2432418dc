"""What ranks hold, measured while real steps run, against what the cost model says of the same plan.

What is measured: the most bytes that the tensors of a rank's own parameters, of gradients, of optimizer states and of
gathered parameters take together, at any moment of a step (`runtime.meter`). Storages count in full, padding of shards
included, from when they are made until they are freed. Gradients are those of a microbatch on their way to the sum, the
sum, what a reduction puts in and gets out; gathered are parameters in full, the buffers they arrive in, and what is
put into those. Not counted: activations, kernels' temporaries, what a transport makes for itself (gloo copies what is
to be reduced). It is the second step: the optimizer has its states.

What is predicted: the terms `parameters`, `gradients`, `optimizer` and `gathered` of the cost model, and the fullest of
the moments of `cost.memory.walked_bytes` with nothing saved, put out or at work: parameters and gradients in passing.
Every rank is compared with what the model says of its place in the pipeline.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from tests.runtime.plans import small_model
from tests.soak import sample
from torch import nn

from wavetrain.base.errors import RunError
from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.cluster.laws import load_laws
from wavetrain.commands.train_run import job_of
from wavetrain.plan import Choice, Layout, OperatorChoice, Plan, Precision
from wavetrain.plan.check import check
from wavetrain.plan.plan import EVERY, num_stages
from wavetrain.runtime.grid import place_of
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.meter import Kind, Meter, metering
from wavetrain.runtime.world import gloo_group
from wavetrain.sim.gather import gather
from wavetrain.sim.stages import stage_bytes, static_bytes

TOLERANCE = 0.02
SEQ = 8
LAWS = replace(load_laws(), buffer_bytes=0.0)  # what gloo and its kind take is none of the four
ACTIVATIONS = (
    "saved_bytes",
    "score_bytes",
    "dropped_bytes",
    "working_bytes",
    "output_elements",
    "norm_elements",
    "activation_elements",
    "logits",
)
UP = "layers.{}.mlp.up"


@dataclass(frozen=True)
class Case:
    """A plan in few words. Matrices from 512 on are sent by themselves where they are replicated, without a copy."""

    blocks: int
    family: str = "gpt"
    hidden: int = 256
    vocab: int = 512
    half: bool = False  # computes in bf16; fp32 values and sums
    dp: int = 2
    microbatches: int = 1
    choice: Choice = field(default_factory=Choice)
    choices: tuple[OperatorChoice, ...] = ()
    layout: dict[str, object] = field(default_factory=dict)


def plan_for(case: Case) -> Plan:
    layout = Layout(global_batch=case.dp * case.microbatches, dp=case.dp, **case.layout)
    stages = num_stages(layout)
    compute = DType.BF16 if case.half else DType.FP32
    plan = Plan(
        model=small_model(
            family=case.family, blocks=case.blocks, hidden=case.hidden, vocab=case.vocab, heads=4, seq_len=SEQ
        ),
        cluster=load_cluster("dgx-h100:1").part(layout.num_devices),
        layout=layout,
        cut=(case.blocks // stages,) * stages,
        seq_len=SEQ,
        choice=case.choice,
        choices=case.choices,
        precision=Precision(compute=compute, products=compute),
    )
    assert not check(plan), check(plan)
    return plan


def predicted(plan):
    """Bytes on each rank of a pipeline."""
    batch = gather([plan])
    nothing = {name: np.zeros_like(getattr(batch.facts, name)) for name in ACTIVATIONS}
    batch = replace(batch, facts=replace(batch.facts, **nothing))
    held = sum(static_bytes(plan, batch, LAWS).values())
    sizes = stage_bytes(plan, batch, LAWS)
    assert all(size.saved == 0 for size in sizes)
    return [float(held[rank]) + max(_passing(plan, sizes, rank)) for rank in range(plan.layout.pp)]


def _passing(plan, sizes, rank):
    for size, own in zip(sizes, plan.placement.ranks, strict=True):
        if own == rank:
            yield from (size.transient_f, size.transient_b)


def measured(plan, **more):
    """Of every rank, the bytes at its peak by kind, the most of each kind, and the losses of two steps."""
    job = job_of(plan, steps=2, transport="gloo", **more)

    def work(world):
        torch.set_num_threads(1)
        with gloo_group(world, timeout_s=60):
            learner = Learner(job, world)
            losses = [learner.step(0).loss]
            modules = [composed.sharded.module for composed in learner.stages.values()]
            with metering(modules, learner._optimizer) as meter:
                losses.append(learner.step(1).loss)
            assert meter.now[Kind.GRADIENTS] == meter.now[Kind.GATHERED] == 0, "a step leaves nothing behind"
            found = {"total": meter.peak_bytes, "peak": meter.peak, "most": meter.most, "losses": losses}
            world.give(json.dumps(found).encode())

    return [json.loads(result) for result in run_local(work, plan.layout.num_devices).check().results]


SHARDED, KEPT = Choice(2), Choice(2, keep=True)


def rest(choice, first=0):
    return OperatorChoice("decoder", EVERY, choice, first=first)


def operator(choice):
    return OperatorChoice("decoder", UP, choice)


CASES = {
    "replicated": Case(2, hidden=512),
    "replicated, 4 ranks": Case(1, "llama", hidden=512, dp=4),
    "replicated, 2 microbatches": Case(6, hidden=512, microbatches=2),
    "replicated, bf16, 2 microbatches": Case(24, hidden=128, half=True, microbatches=2),
    "sharded": Case(6, choice=SHARDED),
    "sharded, bf16": Case(6, choice=SHARDED, half=True),
    "sharded, 4 ranks, bf16": Case(4, "llama", choice=Choice(4), dp=4, half=True),
    "kept": Case(8, choice=KEPT),
    "kept, bf16": Case(6, choice=KEPT, half=True),
    "in groups": Case(4, dp=4, choice=SHARDED),
    "in groups, bf16": Case(4, dp=4, choice=KEPT, half=True),
    "some blocks replicated": Case(8, choice=SHARDED, choices=(rest(Choice(), first=4),)),
    "some blocks kept": Case(8, choice=SHARDED, choices=(rest(KEPT, first=4),)),
    "some blocks in groups": Case(6, dp=4, choice=Choice(4), choices=(rest(SHARDED, first=3),)),
    "an operator replicated": Case(6, hidden=512, choice=SHARDED, choices=(operator(Choice()),)),
    "in slices": Case(12, choice=SHARDED, choices=(operator(Choice(2, slices=4)),)),
    "in slices, bf16": Case(8, choice=SHARDED, choices=(operator(Choice(2, slices=4)),), half=True),
    "pipeline, replicated": Case(12, hidden=512, microbatches=4, layout={"pp": 2}),
    "sharded, 3 microbatches": Case(6, choice=SHARDED, microbatches=3),
    "kept, 3 microbatches, bf16": Case(6, choice=KEPT, microbatches=3, half=True),
    "in groups, 2 microbatches, bf16": Case(4, dp=4, choice=SHARDED, microbatches=2, half=True),
    "1f1b": Case(8, choice=SHARDED, microbatches=4, layout={"pp": 2}),
    "1f1b, kept, bf16": Case(8, choice=KEPT, microbatches=4, half=True, layout={"pp": 2}),
    "wave": Case(12, choice=SHARDED, microbatches=4, layout={"pp": 2, "schedule": "wave"}),
    "wave, bf16": Case(12, choice=SHARDED, microbatches=4, half=True, layout={"pp": 2, "schedule": "wave"}),
    "tensor parallel, 2 microbatches, bf16": Case(6, choice=SHARDED, microbatches=2, half=True, layout={"tp": 2}),
    "tensor parallel": Case(6, choice=SHARDED, layout={"tp": 2}),
    "tensor parallel, bf16": Case(4, "llama", choice=SHARDED, half=True, layout={"tp": 2, "sequence_parallel": True}),
}


@pytest.mark.parametrize("name", sample(sorted(CASES), 8, seed=7))
def test_the_peak_is_the_cost_model_s(name):
    plan = plan_for(CASES[name])
    expected, found = predicted(plan), measured(plan)
    for rank, held in enumerate(found):
        ratio = expected[place_of(plan.layout, rank)[1]] / held["total"]
        assert abs(ratio - 1) <= TOLERANCE, (rank, ratio, held)


# --- slices ---


def only_up(slices):
    """Nothing but one operator of every block is ever gathered."""
    return plan_for(Case(3, choices=(operator(Choice(2, slices=slices)),)))


def test_slices_cut_what_is_gathered_and_change_no_output():
    whole, *cut = (measured(only_up(slices), dtype=torch.float64) for slices in (1, 2, 4))
    full = 256 * 512 * 8
    for rank, before in enumerate(whole):
        # in full, the buffer it was gathered in, and the buffer of the one before
        assert before["most"][Kind.GATHERED] == 3 * (full + 512 * 8)
        for slices, found in zip((2, 4), cut, strict=True):
            assert found[rank]["most"][Kind.GATHERED] * slices == before["most"][Kind.GATHERED]
            assert found[rank]["losses"] == pytest.approx(before["losses"], rel=1e-12)


def test_slices_make_a_model_fit():
    """Four fifths of what it needs without slices are too little, as the first block says; with slices enough."""
    unsplit, split = (plan_for(Case(2, choice=Choice(2, slices=slices))) for slices in (1, 4))
    limit = max(held["total"] for held in measured(unsplit)) * 4 // 5
    with pytest.raises(RunError, match=r"rank \d holds .* with blocks\.0 gathered, .* more than its limit of"):
        measured(unsplit, memory_limit=limit)
    assert all(held["total"] <= limit for held in measured(split, memory_limit=limit))


# --- the meter itself ---


def test_a_storage_counts_from_when_it_is_made_until_it_is_freed():
    with Meter() as meter:
        with meter.making(Kind.GATHERED):
            first = torch.empty(1000)
            view = first[500:]
        other = torch.empty(10_000)
        del first
        assert meter.now[Kind.GATHERED] == 4000  # a view holds it
        del view
        with meter.making(Kind.GRADIENTS):
            second = torch.empty(500)
    assert meter.now[Kind.GATHERED] == 0
    assert meter.now[Kind.GRADIENTS] == second.nbytes
    assert meter.now[Kind.OTHER] == other.nbytes
    assert meter.peak_bytes == meter.most[Kind.GATHERED] == 4000


def linear():
    module = nn.Linear(100, 50, bias=False)
    return module, torch.optim.Adam(module.parameters(), foreach=False), 100 * 50 * 4


def test_a_gradient_counts_beside_the_sum_it_is_added_to():
    module, optimizer, size = linear()
    with metering([module], optimizer) as meter:
        module(torch.randn(3, 100)).sum().backward()
        assert (meter.peak_bytes, meter.now[Kind.GRADIENTS]) == (2 * size, size)
        module(torch.randn(3, 100)).sum().backward()
        assert meter.now[Kind.GRADIENTS] == size
    assert meter.peak_bytes == 3 * size


def test_what_is_freed_by_resizing_is_gone():
    module, optimizer, size = linear()
    with metering([module], optimizer) as meter:
        module.weight.data.untyped_storage().resize_(0)
        assert meter.now[Kind.PARAMETERS] == 0
        module.weight.data.untyped_storage().resize_(size)
        assert meter.now[Kind.PARAMETERS] == size
    module.weight.data.untyped_storage().resize_(0)
    assert meter.now[Kind.PARAMETERS] == size, "no longer looked at"


def test_optimizer_states_that_are_there():
    module, optimizer, size = linear()
    module(torch.randn(3, 100)).sum().backward()
    optimizer.step()
    with metering([module], optimizer) as meter:
        pass
    assert meter.now == {
        Kind.PARAMETERS: size,
        Kind.GRADIENTS: size,
        Kind.OPTIMIZER: 2 * size + 4,  # and the number of steps
        Kind.GATHERED: 0,
        Kind.OTHER: 0,
    }
