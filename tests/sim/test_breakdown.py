"""Where the time of a simulated step goes."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).parent))
from plans import LAWS, model_of, plan_of, plans, priced

from wavetrain.plan.layout import Recompute
from wavetrain.sim.breakdown import TAIL, TERMS, breakdown, busiest, computing, copies, idle_share
from wavetrain.sim.gather import gather
from wavetrain.sim.predict import play


def simulated(plan):
    found = priced(plan)
    return found, play(plan, gather([plan]), found, LAWS)


@settings(max_examples=60)
@given(plans())
def test_terms_sum_to_the_step(plan):
    """Exactly; without a barrier the span of a rank leaves out launching its first receive and its last send."""
    found, run = simulated(plan)
    terms = breakdown(plan, found, run.result, run.step_s)
    assert list(terms) == [name for name in TERMS if name in terms]
    assert sum(terms.values()) == pytest.approx(run.step_s, rel=1e-9 if plan.stack.barrier else 5e-3)
    assert all(value >= 0 for value in terms.values())


@settings(max_examples=30)
@given(plans())
def test_the_busiest_rank_computes_longest(plan):
    _, run = simulated(plan)
    times = [computing(busy) for busy in run.result.busy_s]
    assert times[busiest(run.result)] == max(times)
    assert 0 <= idle_share(run.result) < 1


@settings(max_examples=30)
@given(plans())
def test_what_happens_once_is_the_estimates(plan):
    found, run = simulated(plan)
    terms = breakdown(plan, found, run.result, run.step_s)
    for name in TAIL[:-1]:
        assert terms.get(name, 0.0) == pytest.approx(found.tail[name][0])


def test_recomputation_by_hand():
    plan = plan_of(model_of("gpt3-1.3b", 16), "dgx-a100", global_batch=8, pp=4, seq_len=1024, recompute=Recompute.FULL)
    found, run = simulated(plan)
    terms = breakdown(plan, found, run.result, run.step_s)
    assert terms["recompute"] == pytest.approx(8 * 4 * found.block.recompute_s[0])
    assert terms["compute"] > terms["recompute"]
    assert terms["bubble"] > 0


def test_a_single_device_never_waits():
    plan = plan_of(model_of("gpt3-1.3b", 8), "dgx-a100", global_batch=8, seq_len=1024)
    found, run = simulated(plan)
    terms = breakdown(plan, found, run.result, run.step_s)
    assert set(terms) <= {"compute", "optimizer", "host", "bubble"}
    assert terms.get("bubble", 0.0) <= 1e-12 * run.step_s
    assert idle_share(run.result) <= 0.1  # the tail counts as none


def test_copies():
    chimera = plan_of(model_of("tiny-gpt", 8), "dgx-a100", global_batch=8, pp=4, schedule="chimera")
    assert copies(chimera) == 2
    assert copies(plan_of(model_of("tiny-gpt", 8), "dgx-a100", global_batch=8, pp=4, schedule="wave")) == 1
