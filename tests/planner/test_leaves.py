"""A certificate proves what it says, and nothing else: every way to tamper with one is found out."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from instances import cases_of, problem_of

from wavetrain.planner.choose import choose
from wavetrain.planner.leaves import Case, from_json, gap_of, holds_better, sifted, to_json, verify
from wavetrain.planner.problem import MILLION, Option, Problem, Run, Unit, peak, time


def knapsack(limit=611, *, owning=True):
    """Twelve copies of five levels: its proof needs cases, or (where none owns bytes) a core."""
    levels = tuple(
        Option(fixed=t, held=m, own=w * owning) for t, m, w in ((100, 97, 3), (131, 71, 5), (167, 53, 2), (211, 29, 7))
    )
    ends = tuple(Option(fixed=t, held=m, reduction=t // 3) for t, m in ((10, 37), (19, 22), (37, 5)))
    return Problem(units=(Unit(operators=(levels,), count=12, backward=2), Unit(operators=(ends,))), limit=limit)


def choose_by_cases(problem, **limits):
    """With nothing gone through in full, so that all there is to prove is split into cases."""
    with patch("wavetrain.planner.choose.settle", return_value=None):
        return choose(problem, **limits)


PROBLEM = knapsack()
PROOF = choose_by_cases(PROBLEM).certificate
ITEMS = knapsack(owning=False)
CORE = choose(ITEMS).certificate


def changed(case, **changes):
    cases = list(PROOF.cases)
    cases[case] = replace(cases[case], **changes)
    return replace(PROOF, cases=tuple(cases))


def with_sieve(case, index, **changes):
    sieves = list(PROOF.cases[case].sieves)
    sieves[index] = replace(sieves[index], **changes)
    return changed(case, sieves=tuple(sieves))


def another_selection():
    runs = PROOF.selection[0]
    other = next((pick,) for pick in range(4) if (pick,) != runs[0].picks)
    moved = (Run(runs[0].count - 1, runs[0].picks), Run(1, other), *runs[1:])
    return replace(PROOF, selection=(tuple(run for run in moved if run.count), PROOF.selection[1]))


def scaled(memory):
    return tuple((unit, copy, amount // 100) for unit, copy, amount in memory)


def over_the_limit():
    tight = knapsack(limit=PROOF.peak - 1)
    return tight, replace(PROOF, problem=choose(tight).certificate.problem)


LEAF = len(PROOF.cases) - 1
SPLIT = next(index for index, case in enumerate(PROOF.cases) if case.split)
HELD = next(index for index, case in enumerate(PROOF.cases) if not case.split and case.sieves[-1].memory)
COUNTED = next(index for index, case in enumerate(PROOF.cases) if not case.split and any(case.sieves[-1].rows))
ROOT = PROOF.cases[SPLIT].split

TAMPERED = {
    "another selection": another_selection(),
    "a selection of too few copies": replace(PROOF, selection=(PROOF.selection[0][1:], PROOF.selection[1])),
    "a selection of options there are not": replace(PROOF, selection=(PROOF.selection[0], (Run(1, (9,)),))),
    "a negative option": replace(PROOF, selection=(PROOF.selection[0], (Run(1, (-1,)),))),
    "a selection of no units": replace(PROOF, selection=()),
    "a shorter time": replace(PROOF, time=PROOF.time - 1, lower=PROOF.lower - 1),
    "a longer time": replace(PROOF, time=PROOF.time + 1),
    "a lower peak": replace(PROOF, peak=PROOF.peak - 1),
    "a bound above the time": replace(PROOF, lower=PROOF.lower + 1),
    "no bound": replace(PROOF, lower=None),
    "no selection where there is one": replace(PROOF, selection=None, time=None, peak=None, lower=None),
    "a time without a selection": replace(PROOF, selection=None),
    "a multiplier of memory left out": with_sieve(HELD, -1, memory=()),
    "a multiplier of memory a hundredth": with_sieve(HELD, -1, memory=scaled(PROOF.cases[HELD].sieves[-1].memory)),
    "a multiplier of a row left out": with_sieve(COUNTED, -1, rows=(0,) * len(PROOF.cases[COUNTED].sieves[-1].rows)),
    "a negative multiplier": with_sieve(0, 0, memory=((0, 0, -1),)),
    "a multiplier for no copy": with_sieve(0, 0, memory=((0, 12, 1),)),
    "more time that is longer than all time": with_sieve(0, 0, longer=PROOF.cases[0].sieves[0].time + 1),
    "a multiplier for a row too many": with_sieve(LEAF, -1, rows=(*PROOF.cases[LEAF].sieves[-1].rows, 1)),
    "a leaf dropped": replace(PROOF, cases=PROOF.cases[:-1]),
    "a leaf twice": replace(PROOF, cases=(*PROOF.cases, PROOF.cases[-1])),
    "the first part twice": replace(PROOF, cases=(PROOF.cases[0], PROOF.cases[1], *PROOF.cases[1:])),
    "a leaf that proves nothing": changed(LEAF, sieves=()),
    "a leaf that is split": changed(LEAF, split=ROOT),
    "all cases dropped": replace(PROOF, cases=()),
    "an empty first case": replace(PROOF, cases=(Case(()),)),
    "a split at another count": changed(SPLIT, split=replace(ROOT, bound=ROOT.bound + (3 if ROOT.bound < 3 else -3))),
    "a split of other copies": changed(SPLIT, split=replace(ROOT, first=5)),
    "a split of other choices": changed(SPLIT, split=replace(ROOT, choices=((3,), (9, 9)))),
    "a split that counts twice": changed(SPLIT, split=replace(ROOT, choices=ROOT.choices * 2)),
    "a split of no unit": changed(SPLIT, split=replace(ROOT, unit=7)),
    "a split in one part only": changed(SPLIT, split=replace(ROOT, bound=ROOT.last - ROOT.first + 1)),
    "a split the other way round": changed(SPLIT, split=replace(ROOT, at_least=True)),
    "another problem's name": replace(PROOF, problem="0" * 64),
}


def core(**changes):
    return replace(CORE, cases=(replace(CORE.cases[0], **changes),))


def core_with(**changes):
    *others, last = CORE.cases[0].sieves
    return core(sieves=(*others, replace(last, **changes)))


def worse_selection():
    selection = tuple((Run(unit.count, (len(unit.operators[0]) - 1,)),) for unit in ITEMS.units)
    taken = time(ITEMS, selection)
    return replace(CORE, selection=selection, time=taken, peak=peak(ITEMS, selection), lower=taken)


PRICED = CORE.cases[0].sieves[-1]
CORE_TAMPERED = {
    "a worse selection": worse_selection(),
    "nothing gone through": core(core=False),
    "no multipliers": core(sieves=()),
    "no multiplier of time": core_with(time=0, longer=0),
    "a multiplier of memory left out": core_with(memory=()),
    "a negative multiplier": core_with(memory=((*PRICED.memory[0][:2], -1),)),
    "a multiplier for no copy": core_with(memory=((0, 12, 1),)),
    "more time that is longer than all time": core_with(longer=PRICED.time + 1),
    "a multiplier for a row": core_with(rows=(1,)),
    "a core that is split": core(split=ROOT),
    "a core twice": replace(CORE, cases=CORE.cases * 2),
    "a core where there is no bound": replace(CORE, selection=None, time=None, peak=None, lower=None),
    "a bound above the time": replace(CORE, lower=CORE.lower + 1),
    "a shorter time": replace(CORE, time=CORE.time - 1, lower=CORE.lower - 1),
}


def test_a_core_as_it_was_made_holds():
    assert verify(ITEMS, CORE) == []
    assert CORE.time == choose_by_cases(ITEMS).time
    assert [case.core for case in CORE.cases] == [True]


@pytest.mark.parametrize("kind", CORE_TAMPERED)
def test_tampering_with_a_core_is_found_out(kind):
    assert verify(ITEMS, CORE_TAMPERED[kind]) != []


def test_a_core_in_a_part_is_refused():
    assert verify(PROBLEM, changed(LEAF, core=True)) != []


def test_a_core_proves_no_bound_that_is_too_high():
    tried = 0
    for seed in range(150):
        for problem, best, _ in cases_of(problem_of(seed, operators=6, options=4, units=3, counts=(1, 1, 2)), 2):
            found = choose(problem)
            if best is None or not found.certificate.cases[0].core:
                continue
            tried += 1
            for more in (1, MILLION, best // 10):
                assert holds_better(problem, *_left(problem, found.certificate.cases[0], best + more), best + more)
    assert tried >= 20


def _left(problem, case, lower):
    left = sifted(problem, case.sieves, None, (), lower)
    return left, case.sieves[-1]


def test_cores_and_cases_agree():
    cores = 0
    for seed in range(40):
        shape = {"operators": 7, "options": 4, "units": 4, "counts": (1, 1, 2, 5), "size": (30, 10**9)[seed % 2]}
        free = choose(replace(problem_of(seed, **shape), limit=10**15))
        problem = replace(problem_of(seed, **shape), limit=free.peak * (5 + seed % 5) // 10)
        found, by_cases = choose(problem, time_limit_s=1.0), choose_by_cases(problem, time_limit_s=1.0)
        assert verify(problem, found.certificate) == []
        if found.gap == by_cases.gap == 0:
            assert found.time == by_cases.time
            cores += found.certificate.cases[0].core
    assert cores >= 5


def test_the_proof_as_it_was_made_holds():
    assert verify(PROBLEM, PROOF) == []
    assert gap_of(PROOF) == 0
    assert len(PROOF.cases) >= 3


@pytest.mark.parametrize("kind", TAMPERED)
def test_tampering_is_found_out(kind):
    assert verify(PROBLEM, TAMPERED[kind]) != []


def test_a_selection_over_the_limit_is_refused():
    problem, certificate = over_the_limit()
    assert "the selection does not fit" in verify(problem, certificate)


@pytest.mark.parametrize(
    "change", [{"limit": 610}, {"limit": 612}, {"microbatches": 2}, {"fixed": 1}, {"reduction_share": 1}]
)
def test_a_changed_problem_is_another_one(change):
    assert verify(replace(PROBLEM, **change), PROOF) == ["it was made for another problem"]


def test_one_number_of_one_option_makes_another_problem():
    unit = PROBLEM.units[1]
    options = (replace(unit.operators[0][0], own=1), *unit.operators[0][1:])
    assert verify(replace(PROBLEM, units=(PROBLEM.units[0], replace(unit, operators=(options,)))), PROOF) != []


def test_a_smaller_gap_than_was_proven_is_refused():
    refused = 0
    for seed in range(60):
        for problem, best, _ in cases_of(problem_of(seed, operators=6, options=4, units=3), 2):
            stopped = choose(problem, time_limit_s=0.0)
            assert verify(problem, stopped.certificate) == []
            if stopped.selection is None or stopped.gap == 0:
                continue
            claimed = replace(stopped.certificate, lower=stopped.time)
            if stopped.time > best:
                assert verify(problem, claimed) != []
            refused += verify(problem, claimed) != []
    assert refused >= 5


def test_what_does_not_fit_is_proven_and_not_more():
    problem = knapsack(limit=300)
    found = choose(problem)
    assert found.selection is None
    assert found.tightest.peak == peak(problem, found.tightest.selection) == 12 * 29 + 7 + 5
    assert verify(problem, found.certificate) == []
    roomy = knapsack(limit=found.tightest.peak)
    assert verify(roomy, replace(found.certificate, problem=choose(roomy).certificate.problem)) != []


def test_json_there_and_back():
    for certificate in (PROOF, CORE, choose(knapsack(limit=300)).certificate):
        text = json.dumps(to_json(certificate))
        assert from_json(json.loads(text)) == certificate
    with pytest.raises(ValueError, match="format"):
        from_json({})
    with pytest.raises(ValueError, match="not a certificate"):
        from_json({"format": "wavetrain-choice-1"})
