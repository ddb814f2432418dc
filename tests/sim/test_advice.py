"""What is advised where a plan does not fit."""

import pytest

from wavetrain.cluster import load_cluster
from wavetrain.model import load_model
from wavetrain.plan import Request, check, plan_of
from wavetrain.sim.advice import remedies
from wavetrain.sim.predict import simulate


def requested(**options):
    usual = {"model": load_model("llama2-70b"), "cluster": load_cluster("dgx-h100:8"), "global_batch": 64}
    return plan_of(Request(**(usual | options)))


@pytest.mark.parametrize("options", [{"tp": 4}, {"tp": 8, "microbatch": 8}, {"shard": "dp", "keep": True}])
def test_advice_is_legal_fits_and_is_sorted(options):
    plan = requested(**options)
    assert not simulate(plan).fits
    found = remedies(plan)
    assert 2 <= len(found) <= 3
    assert [r.step_s for r in found] == sorted(r.step_s for r in found)
    for remedy in found:
        assert check(remedy.plan) == []
        assert remedy.needed_bytes <= plan.cluster.device.memory_bytes
        assert simulate(remedy.plan).fits


def test_where_nothing_helps_nothing_is_advised():
    assert remedies(requested(model=load_model("gpt3-175b"), cluster=load_cluster("dgx-a100:1"), tp=8)) == []
