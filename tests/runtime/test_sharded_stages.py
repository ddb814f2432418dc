"""One stage of a pipeline, sharded: microbatches in flight, split backwards, and what is gathered for them.

Each rank runs its own stage of a pipeline of two, twice replicated. What its neighbours would send, hidden states and
gradients, is known from one plain process.
"""

from dataclasses import replace

import pytest
import torch
from tests.runtime.near import close
from tests.runtime.plans import small_model
from tests.runtime.sharding import SEQ, Counted, batches
from torch.distributed.tensor import DTensor

from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.plan import Choice, Layout, OperatorChoice, Plan, Precision
from wavetrain.plan.check import check
from wavetrain.runtime.chunk import Batch, Computed
from wavetrain.runtime.grid import open_grid
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.sharded import (
    accumulate,
    complete,
    gathered_bytes,
    load_whole,
    prepare,
    reduce_now,
    resident,
    shard_stage,
    whole_gradients,
    whole_parameters,
)
from wavetrain.runtime.split import Split, split
from wavetrain.runtime.stages import cut_into_stages, materialize
from wavetrain.runtime.transformer import parts_of
from wavetrain.runtime.world import gloo_group

CUT, MICROBATCHES = (2, 1), 3
ONE_AFTER_ANOTHER = "F0 B0 F1 B1 F2 B2"
IN_FLIGHT = "F0 F1 B0 F2 B1 B2"
SPLIT = "F0 F1 I0 F2 I1 W0 I2 W1 W2"


def model_of(family="llama"):
    return small_model(blocks=sum(CUT), family=family, hidden=16, vocab=30, seq_len=SEQ)


def plan_for(model, *, choice, choices=(), dp=2, **layout):
    plan = Plan(
        model=model,
        cluster=load_cluster("dgx-h100:1").part(2 * dp),
        layout=Layout(global_batch=dp * MICROBATCHES, dp=dp, pp=2, **layout),
        cut=CUT,
        seq_len=SEQ,
        choice=choice,
        choices=tuple(choices),
        precision=Precision(compute=DType.FP32, products=DType.FP32),
    )
    assert not check(plan), check(plan)
    return plan


def stages_of(model, wanted, dtype=torch.float64):
    stages = cut_into_stages(parts_of(model), CUT, wanted)
    materialize(stages, seed=3, dtype=dtype)
    return stages


def expected_of(model, dp):
    """By stage: gradients; by replica and microbatch: the hidden states between the two stages, and their gradients."""
    stages = stages_of(model, [0, 1])
    tokens, targets, count = batches(dp, MICROBATCHES, 0)
    between = {}
    for replica in range(dp):
        for m in range(MICROBATCHES):
            out = stages[0](tokens[replica, m])
            hidden = out.detach().requires_grad_()
            (stages[1](hidden, targets[replica, m]) / count).backward()
            out.backward(hidden.grad)
            between[replica, m] = hidden.detach(), hidden.grad
    return {number: {name: p.grad for name, p in stage.named()} for number, stage in stages.items()}, between


class Summed:
    """What a chunk tells a sharded stage."""

    def __init__(self, sharded):
        self.sharded = sharded

    def before_backward(self, *, is_last):
        prepare(self.sharded, is_last=is_last)

    def after_backward(self, *, is_last, is_split):
        if is_split:
            accumulate(self.sharded)
        if is_last:
            (reduce_now if is_split else complete)(self.sharded)

    def held_bytes(self):
        return 0  # tested by itself

    def resident(self):
        return resident(self.sharded)


def run_order(chunk, order, grid, between):
    """One step of a stage; what it holds after its first forward."""
    tokens, targets, count = batches(grid.layout.dp, MICROBATCHES, 0)
    numbers = range(MICROBATCHES)
    mine = {m: tokens[grid.replica, m] for m in numbers}, {m: targets[grid.replica, m] for m in numbers}
    chunk.begin(Batch(*mine, count))
    stage, held = chunk.stage, None
    for kind, number in order.split():
        m = int(number)
        hidden, gradient = between[grid.replica, m]
        gradient = None if stage.is_last else gradient
        if kind == "F":
            chunk.forward(m, None if stage.is_first else hidden.clone())
            held = held or chunk.held_bytes
        elif kind == "W":
            chunk.backward_weight(m)
        else:
            (chunk.backward if kind == "B" else chunk.backward_input)(m, gradient)
    return held


def mixed(keep):
    """Named operators sharded and replicated, one of them in one block only, slices, and the rest sharded."""
    up, down, query = (f"model.layers.{{}}.{name}_proj" for name in ("mlp.up", "mlp.down", "self_attn.q"))
    return [
        OperatorChoice("decoder", up, Choice(1)),
        OperatorChoice("decoder", down, Choice(2, slices=2), first=2),
        OperatorChoice("decoder", query, Choice(2, keep=keep), first=1, count=1),
        OperatorChoice("head", "*", Choice(1)),
    ]


def check_gradients(sharded, expected):
    found = whole_gradients(sharded)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        close(found[name], gradient, name)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("order", [ONE_AFTER_ANOTHER, IN_FLIGHT, SPLIT])
@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_a_stage_adds_up_what_one_process_does_and_gathers_what_it_uses(monkeypatch, family, order, keep):
    model = model_of(family)
    plan = plan_for(model, choice=Choice(2, keep=keep), choices=mixed(keep) if family == "llama" else ())
    expected, between = expected_of(model, 2)

    def work(world):
        with gloo_group(world, timeout_s=60):
            grid = open_grid(plan, rank=world.rank, size=world.size)
            stage = stages_of(model, [grid.stage_rank])[grid.stage_rank]
            plain = {name: parameter.detach().clone() for name, parameter in stage.named()}
            sharded = shard_stage(stage, plan, grid)
            chunk = Computed(stage, split=order == SPLIT, accumulation=Summed(sharded))
            gathering = [unit for unit in sharded.units if unit.modules != (stage,)]
            kept = sum(unit.choice.keep for unit in gathering)
            for _ in range(2):
                counted = Counted(monkeypatch)
                run_order(chunk, order, grid, between)
                assert len(counted.gathers) == kept + 2 * MICROBATCHES * (len(gathering) - kept)
                assert len(counted.reductions) == len(gathering)
                assert gathered_bytes(stage.modules()) == 0
                check_gradients(sharded, expected[stage.number])
                stage.zero_grad()
            found = whole_parameters(sharded)
            assert all(torch.equal(found[name], value) for name, value in plain.items())
            load_whole(sharded, {name: value + 1 for name, value in plain.items()})
            found = whole_parameters(sharded)
            assert all(torch.equal(found[name], value + 1) for name, value in plain.items())

    run_local(work, 4).check()


@pytest.mark.parametrize("order", [IN_FLIGHT, SPLIT])
def test_a_stage_of_replicated_operators_is_left_as_it_is(order):
    model = model_of()
    plan = plan_for(model, choice=Choice(1), pp_inside=True)
    expected, between = expected_of(model, 2)

    def work(world):
        with gloo_group(world, timeout_s=60):
            grid = open_grid(plan, rank=world.rank, size=world.size)
            stage = stages_of(model, [grid.stage_rank])[grid.stage_rank]
            own = dict(stage.named())
            sharded = shard_stage(stage, plan, grid)
            assert not sharded.units
            assert all(stage_own is own[name] for name, stage_own in stage.named())
            run_order(Computed(stage, split=order == SPLIT, accumulation=Summed(sharded)), order, grid, between)
            check_gradients(sharded, expected[stage.number])

    run_local(work, 4).check()


def test_gathered_parameters_are_no_activations():
    model = model_of()
    plan = plan_for(model, choice=Choice(2), choices=mixed(keep=True))
    _, between = expected_of(model, 2)

    def work(world):
        with gloo_group(world, timeout_s=60):
            grid = open_grid(plan, rank=world.rank, size=world.size)
            number = grid.stage_rank
            held = []
            for is_sharded in (False, True):
                stage = stages_of(model, [number])[number]
                accumulation = Summed(shard_stage(stage, plan, grid)) if is_sharded else None
                held.append(run_order(Computed(stage, accumulation=accumulation), IN_FLIGHT, grid, between))
            # A row of inputs in slices is a copy that a whole product does not need.
            sliced = 2 * SEQ * 2 * 16 * 8 if number == 1 else 0
            norms = (2 * CUT[number] + number) * 16 * 8  # each saves a copy of its weight
            assert held[0] + norms <= held[1] <= held[0] + norms + sliced

    run_local(work, 4).check()


def test_a_stage_whose_operators_are_cut_already():
    """As tensor parallelism leaves them: other shapes, slices, no bias."""
    model = model_of("gpt")
    up, down = (o.name for o in model.layers[1].operators if "mlp" in o.name and o.slice_dims)
    choices = [OperatorChoice("decoder", up, Choice(2, slices=4)), OperatorChoice("decoder", down, Choice(2))]
    plan = plan_for(model, choice=Choice(2), choices=choices)

    def work(world):
        with gloo_group(world, timeout_s=60):
            grid = open_grid(plan, rank=world.rank, size=world.size)
            stage = stages_of(model, [grid.stage_rank])[grid.stage_rank]
            for block in stage.blocks:
                block.mlp.up = split(block.mlp.up, slices=2)
                block.mlp.down.register_parameter("bias", None)
            named = {name for part in stage.members for name in part.names.values()}
            sharded = shard_stage(stage, plan, grid)
            first = stage.blocks[0].mlp
            assert isinstance(first.up, Split)
            assert len(first.up.leaves) == 4
            assert all(isinstance(leaf.weight, DTensor) for leaf in first.up.leaves.values())
            missing = named - set(sharded.pieces)
            assert {name.rpartition(".")[2] for name in missing} == {"bias"}
            assert len(missing) == len(stage.blocks)

    run_local(work, 4).check()


@pytest.mark.parametrize("order", [IN_FLIGHT, SPLIT])
def test_gradients_add_up_in_float32_where_products_are_in_bfloat16(order):
    """Equal microbatches: three of them give three times the gradient of one, which bfloat16 could not add exactly."""
    model = model_of()
    plan = replace(plan_for(model, choice=Choice(2, keep=True)), precision=Precision())

    def work(world):
        with gloo_group(world, timeout_s=60):
            grid = open_grid(plan, rank=world.rank, size=world.size)
            stage = stages_of(model, [grid.stage_rank], torch.float32)[grid.stage_rank]
            sharded = shard_stage(stage, plan, grid)
            chunk = Computed(stage, split=order == SPLIT, accumulation=Summed(sharded))
            hidden = torch.randn(2, SEQ, 16)
            gradient = None if stage.is_last else torch.ones(2, SEQ, 16)
            tokens = torch.arange(2 * SEQ).view(2, SEQ) % 30
            found = []
            for count in (1, MICROBATCHES):
                same = dict.fromkeys(range(count), tokens)
                chunk.begin(Batch(same, same, 2 * SEQ))
                for m in range(count):
                    chunk.forward(m, None if stage.is_first else hidden.clone())
                for m in range(count):
                    (chunk.backward_input if order == SPLIT else chunk.backward)(m, gradient)
                for m in range(count if order == SPLIT else 0):
                    chunk.backward_weight(m)
                found.append(whole_gradients(sharded))
                stage.zero_grad()
            for name, one in found[0].items():
                assert one.dtype is torch.float32
                torch.testing.assert_close(found[1][name], 3 * one, rtol=1e-6, atol=0)

    run_local(work, 4).check()
