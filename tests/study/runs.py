"""Runs that never happened: a simulation handed in as if it were measured."""

from wavetrain.plan.plan import Plan
from wavetrain.sim.predict import Prediction
from wavetrain.study.compare import merged
from wavetrain.study.measured import KINDS, Run


def run_of(plan: Plan, prediction: Prediction, **over) -> Run:
    """What a runtime would say if the prediction were what happened: recomputation is part of compute."""
    ranks = plan.layout.pp
    values = {
        "where": "run",
        "plan": plan,
        "ranks": ranks,
        "steps": 8,
        "step_s": prediction.step_s,
        "bubble_fraction": prediction.bubble_fraction,
        "terms": (merged(prediction.breakdown),) * ranks,
        "stage_ranks": tuple(range(ranks)),
        "memory": {name: value for name, value in prediction.memory.items() if name in KINDS},
        "timeline": prediction.timeline,
        "environment": {"cpu": "none"},
    }
    return Run(**values | over)
