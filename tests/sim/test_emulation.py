"""What ranks wait for when they are emulated is the compute that the simulator counts, and nothing else."""

from __future__ import annotations

import pytest

from wavetrain.cluster import load_cluster
from wavetrain.model import load_model
from wavetrain.plan import Plan, Request, plan_of
from wavetrain.sim.emulation import emulation
from wavetrain.sim.predict import simulate, to_run


def plan(**more: object) -> Plan:
    asked = {"global_batch": 32, "overlap": ()} | more
    return plan_of(Request(model=load_model("llama3-8b"), cluster=load_cluster("dgx-h100:2"), **asked))  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{}, {"shard": "dp"}, {"shard": "8", "keep": True}, {"recompute": "full"}])
def test_waits_are_the_compute_of_a_step(more: dict[str, object]) -> None:
    wanted = plan(**more)
    found, terms = emulation(wanted), simulate(wanted).breakdown
    (layers,) = found.stages
    waited_s = sum(layer.forward_s + layer.input_s + layer.weight_s for layer in layers)
    expected_s = terms["compute"] + terms.get("recompute", 0.0)
    assert wanted.layout.num_microbatches * waited_s == pytest.approx(expected_s)
    assert (found.optimizer_s, found.host_s) == pytest.approx((terms["optimizer"], terms["host"]))


@pytest.mark.parametrize("more", [{"schedule": "zb-h1"}, {"waves": 2}, {"chunks": 3, "schedule": "interleaved"}])
def test_stages_wait_as_long_as_their_actions_are_predicted(more: dict[str, object]) -> None:
    wanted = plan(pp=4, **more)
    _, times = to_run(wanted)
    for layers, t in zip(emulation(wanted).stages, times, strict=True):
        sums = [sum(getattr(layer, f"{part}_s") for layer in layers) for part in ("forward", "input", "weight")]
        assert sums == pytest.approx([t.f, t.i, t.w])


def test_every_parameter_is_somewhere_once() -> None:
    for more in ({}, {"shard": "dp"}, {"shard": "4", "pp": 2}):
        wanted = plan(**more)
        layers = [layer for stage in emulation(wanted).stages for layer in stage]
        held = sum(layer.replicated + sum(travel.elements for travel in layer.sharded) for layer in layers)
        assert held == wanted.model.num_parameters  # untied
