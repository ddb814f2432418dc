"""Whole steps of real ranks, by phase."""

import json
from functools import partial

import pytest

from wavetrain.runtime import measure_steps
from wavetrain.runtime.executor import Moment
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.measure_steps import step_samples
from wavetrain.runtime.report import Limits
from wavetrain.runtime.samples import (
    AGAIN,
    ALONE,
    BACKWARD,
    DEEP,
    EMPTY,
    FORWARD,
    OPTIMIZER,
    QUICK_MODELS,
    RECOMPUTED,
    REST,
    TINY,
    Sample,
    joint_cases,
    lone_case,
    lone_cases,
    smalls,
    step_case,
)
from wavetrain.runtime.turns import Part, in_turns
from wavetrain.runtime.world import World

PATIENT = Limits(floor_s=300.0, start_s=300.0)


def samples(ranks: int) -> list[list[Sample]]:
    """What each rank has after two turns."""

    def work(world: World) -> None:
        parts = [
            Part("alone", partial(step_samples, cases=lone_cases(quick=True))),
            Part("together", partial(step_samples, cases=joint_cases(world.size))),
        ]
        found = in_turns(world, parts, 2, lambda *_: None, forks=True)
        world.give(json.dumps([one.row for one in found]).encode())

    results = run_local(work, ranks, limits=PATIENT).check().results
    return [list(map(Sample.of, json.loads(one))) for one in results]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_has_the_same_samples_of_every_model_and_phase(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(measure_steps, "STEPS", ((512, 2),))
    monkeypatch.setattr(measure_steps, "STEPS_TOGETHER", ((512, 2),))
    found, *others = samples(ranks)
    assert all(other == found for other in others)
    assert all(one.seconds > 0 for one in found)
    for phase in (FORWARD, BACKWARD, OPTIMIZER, REST):
        assert set(smalls(found, phase)) == set(QUICK_MODELS)
    again, forward, backward = (smalls(found, phase)[DEEP] for phase in (AGAIN, FORWARD, BACKWARD))
    assert again > forward + backward
    whole = [(one.what, one.sizes, one.ranks) for one in found if one.what.startswith("step-")]
    assert whole == [(case.what, case.sizes, case.ranks) for case in joint_cases(ranks)]
    assert [step_case(one) for one in found if one.what.startswith("step-")] == joint_cases(ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
def test_steps_are_planned_for_as_many_ranks_as_there_are(ranks: int) -> None:
    for case in [*lone_cases(quick=False), *joint_cases(ranks)]:
        layout = case.plan().layout
        assert layout.num_devices == case.ranks
        assert (layout.num_microbatches, case.ranks) in ((case.microbatches, 1), (case.microbatches, ranks))
        assert layout.pp == (ranks if case.what == EMPTY else 1)


def test_phases_are_of_one_microbatch_and_sum_to_the_step() -> None:
    moments = [
        Moment(name, "compute", start_s, end_s, 0, 0)
        for name, start_s, end_s in (("0F0", 0.0, 1.0), ("0B0", 1.0, 3.0), ("0F1", 3.5, 4.1), ("0B1", 5.0, 7.6))
    ]
    step = measure_steps._Step(moments, 10.0, 1.5)
    found = measure_steps._by_phase(lone_case(ALONE, TINY), step)
    assert found == pytest.approx({FORWARD: 0.8, BACKWARD: 2.3, OPTIMIZER: 1.5, REST: 2.3})
    assert 2 * (found[FORWARD] + found[BACKWARD]) + found[OPTIMIZER] + found[REST] == pytest.approx(10.0)
    assert measure_steps._by_phase(lone_case(RECOMPUTED, TINY), step) == pytest.approx({AGAIN: 3.1})
    assert all(measure_steps._by_phase(case, step) == {measure_steps.WHOLE: 10.0} for case in joint_cases(2))
