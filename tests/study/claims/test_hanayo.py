"""Hanayo's claims that the predictions meet, and the list of those that they do not.

On `pc` and `tacc` the link rates were fitted to the figure that is compared with: those cases keep a fit, no more.
"""

import pytest

from wavetrain.study.claims import hanayo

# Not met: halves of layers are priced as they are, and half a layer with attention takes longer than the other half;
# on TC 118.6 % against 124.5 % (as two equal halves it was within 5).
NOT_MET = (("tc", 1, "wave 8"),)
MET = [(*key, wave) for key in hanayo.FIGURE_9 for wave in hanayo.WAVES if (*key, wave) not in NOT_MET]
KNOWN = {
    "Bubble of 2 waves, P = B = 8, by the printed formula",  # which contradicts the paper's own drawing
    "8 waves over Chimera-wave: TC, D = 1, P = 8",
    "4 waves over DAPPLE (1F1B): PC, D = 1, P = 8",
    "4 waves over GPipe: PC, D = 1, P = 8",
    "8 waves over GPipe: PC, D = 2, P = 4",
    "4 waves over GPipe: FC, D = 2, P = 4",
    "4 waves over DAPPLE (1F1B): TC, D = 2, P = 4",
    "8 waves over DAPPLE (1F1B): TC, D = 2, P = 4",
    "4 waves over GPipe: TC, D = 2, P = 4",
    "8 waves over GPipe: TC, D = 2, P = 4",
}


@pytest.mark.parametrize(("cluster", "replicas", "wave"), MET)
def test_waves_gain_over_chimera_wave_what_hanayo_measured(cluster, replicas, wave):
    published = dict(zip(hanayo.SCHEMES, hanayo.FIGURE_9[cluster, replicas], strict=True))
    ours = hanayo.hanayo_rates(cluster, replicas)
    measured = 100 * published[wave] / published["chimera-wave"]
    assert 100 * ours[wave] / ours["chimera-wave"] == pytest.approx(measured, abs=5)


@pytest.mark.parametrize("key", hanayo.FIGURE_9)
def test_the_best_wave_depends_on_the_links(key):
    """What was measured fastest is within 1 % of what is predicted fastest: 2 or 4 waves on TACC, 8 with NVLink."""
    measured = dict(zip(hanayo.SCHEMES, hanayo.FIGURE_9[key], strict=True))
    rates = hanayo.hanayo_rates(*key)
    best = max(hanayo.WAVES, key=measured.__getitem__)
    assert rates[best] >= 0.99 * max(rates[wave] for wave in hanayo.WAVES)


def test_eight_waves_on_tacc_are_worse_than_chimera_wave():
    rates = hanayo.hanayo_rates("tacc", 1)
    assert rates["wave 8"] < rates["chimera-wave"] < rates["wave 2"]


@pytest.mark.parametrize("cluster", ["fc", "tacc", "tc"])
def test_sequences_per_second_are_those_of_figure_9(cluster):
    for rate, measured in zip(hanayo.hanayo_rates(cluster, 1).values(), hanayo.FIGURE_9[cluster, 1], strict=True):
        assert rate == pytest.approx(measured, rel=0.06)


def test_bubbles_are_those_of_the_drawings():
    for claim in hanayo.bubble_claims():
        if claim.source == hanayo.DRAWN:
            assert claim.ours == pytest.approx(claim.published, abs=1e-9)


def test_executed_numbers_stand_beside_the_bubbles_and_the_ratios_of_fast_links():
    claims = {(claim.text, claim.source): claim for claim in hanayo.hanayo_claims()}
    bubble = claims["Bubble of 2 waves, P = B = 8, as drawn", hanayo.DRAWN]
    assert bubble.executed.value == pytest.approx(bubble.ours, abs=hanayo.TOLERANCE)
    assert "benchmarks/waves.py" in bubble.executed.command
    executed = {text for (text, _), claim in claims.items() if claim.executed}
    assert "2 waves over DAPPLE (1F1B): FC, D = 1, P = 8" in executed
    assert not any(name in text for text in executed for name in ("PC", "TACC", "TC", "Chimera", "8 waves"))


def test_what_does_not_hold_is_known():
    """A figure on which nothing was fitted is missed as a whole: waves gain less over Chimera-wave there than here."""
    missed = {claim.text for claim in hanayo.hanayo_claims() if not claim.holds}
    figure_10 = {claim.text for claim in hanayo.figure_10_claims()}
    assert missed <= KNOWN | figure_10
