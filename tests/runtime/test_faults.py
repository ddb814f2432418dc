"""A rank of a real pipeline is killed, stopped, made to raise or cut off: the culprit is named and nobody is left.

All cases with WAVETRAIN_SOAK=1 (`make soak`), else a seeded sample.
"""

import json
from itertools import product

import pytest
from tests.runtime.namespaces import needs_namespaces
from tests.runtime.plans import small_plan
from tests.soak import sample

from wavetrain.commands.train import job_of
from wavetrain.runtime.inject import DURING, Fault, Kinds
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.report import Cause, Limits
from wavetrain.runtime.trainer import train
from wavetrain.runtime.virtual import network

RANKS, STEP = 4, 1
ENDING = [kind for kind in Kinds if kind is not Kinds.SLOW]  # that one ends no run: test_stragglers.py
EVERY = [(kind, when, rank) for kind, when, rank in product(ENDING, DURING, range(RANKS))]
LOCAL = [case for case in EVERY if case[0] is not Kinds.DROP]
DROPS = [case for case in EVERY if case[0] is Kinds.DROP]
EXPECTED = {
    Kinds.KILL: Cause.KILLED,
    Kinds.STOP: Cause.STOPPED,
    Kinds.EXCEPTION: Cause.EXCEPTION,
    Kinds.DROP: Cause.SILENT,
}


def job(kind, when, rank, transport):
    plan = small_plan(pp=RANKS, schedule="wave", microbatches=RANKS, blocks=2 * RANKS)
    fault = Fault(kind=kind, rank=rank, step=STEP, when=when)
    return job_of(plan, steps=4, transport=transport, faults=(fault,))


def run(made, limits, report_dir, **options):
    def work(world):
        train(made, world)

    return run_local(work, RANKS, limits=limits, actions=made.actions, report_dir=report_dir, **options)


def check(report, kind, rank):
    assert (report["culprit"], report["cause"]) == (rank, EXPECTED[kind]), report
    others = [status for status in report["ranks"] if status["rank"] != rank]
    assert len(others) == RANKS - 1
    assert report["chain"][0] == rank


@pytest.mark.parametrize("transport", ["memory", "gloo"])
@pytest.mark.parametrize(("kind", "when", "rank"), sample(LOCAL, 4))
def test_culprit_is_named(kind, when, rank, transport, tmp_path):
    outcome = run(job(kind, when, rank, transport), Limits(floor_s=1.5, start_s=60.0), tmp_path)
    assert outcome.exit_code == 4
    assert outcome.ended_s < 5.0
    check(json.loads((tmp_path / "report.json").read_text()), kind, rank)


@needs_namespaces
@pytest.mark.parametrize(("kind", "when", "rank"), sample(DROPS, 2))
def test_rank_that_is_cut_off_is_named(kind, when, rank, tmp_path):
    made = job(kind, when, rank, "gloo")
    with network(RANKS) as net:

        def act():
            limits = Limits(floor_s=2.0, start_s=60.0)
            outcome = run(made, limits, tmp_path, host=net.address, prepare=net.prepare)
            return outcome.exit_code if outcome.ended_s < 5.0 else 1

        assert net.run(act) == 4
    check(json.loads((tmp_path / "report.json").read_text()), kind, rank)
