"""What a claim is, and when it holds."""

import math

import pytest

from wavetrain.study.claims import Bounds, Claim, Executed, all_claims
from wavetrain.study.claims.claim import near

RUN = Executed(9.0, "on two ranks", "python run.py", "2026-11-16")


def claim(**changes) -> Claim:
    usual = {"work": "OSDP", "text": "t", "source": "Table 1", "published": 5.0, "ours": 5.5, "unit": "%"}
    return Claim(**({**usual, "bounds": near(5.0, 1.0)} | changes))


@pytest.mark.parametrize(
    ("value", "missed"), [(4.0, 0), (6.0, 0), (5.0, 0), (3.5, -0.5), (6.25, 0.25), (math.nan, math.inf)]
)
def test_bounds_include_their_ends(value, missed):
    assert near(5.0, 1.0).missed(value) == missed


def test_one_sided_bounds():
    assert Bounds(most=1.03).missed(1.2) == pytest.approx(0.17)
    assert Bounds(most=1.03).missed(-9) == 0
    assert Bounds(least=10).missed(9) == -1
    assert (Bounds(most=1.03).words, Bounds(least=10.0).words, near(5.0, 1.0).words) == (
        "at most 1.03",
        "at least 10",
        "4 to 6",
    )


def test_a_verdict_says_by_how_much():
    assert claim().verdict.words == "holds"
    assert claim().difference == 0.5
    far = claim(ours=2.0)
    assert not far.holds
    assert far.verdict.words == "does not hold: 2 below 4 to 6"
    assert claim(ours=7.25).verdict.words == "does not hold: 1.25 above 4 to 6"


def test_what_was_executed_is_judged_by_the_same_rule_but_does_not_decide():
    both = claim(executed=RUN)
    assert both.holds
    assert both.verdict.executed_holds is False
    assert both.verdict.words == "holds; executed: does not hold: 3 above 4 to 6"
    assert claim(ours=9.0, executed=Executed(5.0, "", "", "")).holds is False


def test_without_a_number_nothing_holds():
    none = claim(ours=None, missing="nothing fits")
    assert not none.holds
    assert none.verdict.words == "can't be judged: nothing fits"
    assert none.difference is None
    assert claim(published=None).difference is None


def test_a_published_range():
    assert claim(published=(4.0, 6.0)).difference == 0
    assert claim(published=(4.0, 6.0), ours=6.5).difference == pytest.approx(0.5)


def test_every_claim_has_a_source_and_no_two_are_the_same():
    claims = list(all_claims(lambda _: ()))
    assert len({(claim.text, claim.source) for claim in claims}) == len(claims)
    assert all(claim.source and claim.text and claim.unit for claim in claims)
    assert {claim.work for claim in claims} == {"Hanayo", "OSDP", "Hardware scaling"}


def test_without_records_no_claim_of_the_third_work_is_judged():
    """But those of fixed layouts are; nothing holds for want of data."""
    claims = [c for c in all_claims(lambda _: ()) if c.source.startswith("arXiv 2411.13055")]
    assert len(claims) > 10
    assert not any(claim.holds for claim in claims)
