"""The published table of OSDP, and the plan its own search finds in it."""

import csv
from pathlib import Path

import pytest

from wavetrain.planner.choose import choose
from wavetrain.planner.leaves import verify
from wavetrain.planner.problem import Option, Problem, Run, Unit

LIMIT_MB = 8192 - 800  # the artifact takes 800 MB off for all that is not in the table


def problem_of(hidden, batch):
    """48 blocks of four levels; the artifact cuts the memory of a block to whole MB."""
    with (Path(__file__).parent / "osdp_table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    levels = tuple(
        Option(fixed=round(float(row["time_s"]) * 1e12), held=int(float(row["memory_mb"])))
        for row in rows
        if (int(row["hidden"]), int(row["batch"])) == (hidden, batch)
    )
    assert len(levels) == 4
    return Problem(units=(Unit(operators=(levels,), count=48),), limit=LIMIT_MB)


def test_the_plan_of_the_artifact_is_the_best():
    problem = problem_of(1536, 1)
    found = choose(problem)
    assert found.time / 1e18 == pytest.approx(2.9019, abs=5e-5)
    assert sorted(found.selection[0], key=lambda run: run.picks) == [Run(2, (1,)), Run(46, (2,))]
    assert verify(problem, found.certificate) == []


@pytest.mark.parametrize(("hidden", "batch", "least"), [(1536, 2, 48 * 174), (2048, 1, 48 * 177)])
def test_what_does_not_fit(hidden, batch, least):
    problem = problem_of(hidden, batch)
    found = choose(problem)
    assert found.selection is None
    assert found.tightest.peak == least
    assert verify(problem, found.certificate) == []
