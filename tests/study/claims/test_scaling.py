"""The third work's claims on records made by hand: they hold where they must, and do not where they must not."""

from math import log

import pytest

from wavetrain.study.claims import scaling
from wavetrain.study.scaling.record import Record

SCALES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def record(devices, rate, *, strategy="fsdp", watts=600.0, **changes) -> Record:
    """A point where each device does `rate` tokens/s; None: nothing fits."""
    usual = {"model": "llama2-7b", "seq_len": 4096, "node": "dgx-h100", "objective": "throughput"}
    where = usual | {"batch": "2 per device"} | changes
    point = {"devices": devices, "strategy": strategy, "global_batch": 2 * devices, **where}
    if rate is None:
        return Record(fits=False, why="too large", **point)
    return Record(
        fits=True,
        tokens_per_s=rate * devices,
        tokens_per_s_per_device=rate,
        power_w_per_device=watts,
        power_w=watts * devices,
        tokens_per_joule=rate / watts,
        usd_per_hour=2.0 * devices,
        **point,
    )


def line(rates, scales=SCALES, **changes):
    return [record(devices, rate, **changes) for devices, rate in zip(scales, rates, strict=True)]


def falling(last, *, knee=128, first=1000.0):
    """Flat up to `knee`, then down to `last` of it at 2,048, evenly over doublings."""
    steps = [max(0, SCALES.index(n) - SCALES.index(knee)) for n in SCALES]
    return [first * (1 - (1 - last) * step / steps[-1]) for step in steps]


def by_text(claims):
    return {claim.text: claim for claim in claims}


# --- weak scaling ---


@pytest.mark.parametrize(
    ("rate", "watts", "holds"),
    [
        (627.8, 564.8, (True, True, True)),  # as published
        (545.0, 564.8, (False, True, False)),  # more lost than any of it
        (710.0, 564.8, (False, True, False)),  # less
        (627.8, 600.0, (True, False, True)),  # power that does not fall
        (627.8, 530.0, (True, False, True)),  # that falls too much
        (640.0, 450.0, (True, False, False)),  # with it, tokens per joule
    ],
)
def test_what_fsdp_loses(rate, watts, holds):
    claims = list(scaling.weak_claims([record(128, 1000.0), record(2048, rate, watts=watts)]))
    assert tuple(claim.holds for claim in claims) == holds
    assert claims[0].ours == pytest.approx(rate / 10 - 100)
    assert claims[1].ours == pytest.approx(100 * (watts / 600 - 1))
    assert [claim.published for claim in claims] == [-37.22, -5.87, -33.3]


def test_no_plan_at_one_end_is_no_loss():
    for records in ([record(128, 1000.0), record(2048, None)], [record(2048, 600.0)], []):
        claims = list(scaling.weak_claims(records))
        assert not any(claim.holds for claim in claims)
        assert claims[0].verdict.words == "can't be judged: no plan for 128 or 2,048 devices"


def test_other_strategies_are_not_taken_for_fsdp():
    claims = list(scaling.weak_claims([record(128, 1000.0, strategy="free"), record(2048, 630.0, strategy="free")]))
    assert claims[0].ours is None


def test_where_communication_binds():
    rates = [1000.0] * 4 + [960.0, 900.0, 800.0, 700.0, 600.0]
    (claim,) = scaling.bound_claims(line(rates))
    assert claim.ours == pytest.approx(128 * 2 ** (10 / 60))  # from 960 to 900, over the logarithm
    assert claim.holds
    (late,) = scaling.bound_claims(line([1000.0] * 7 + [960.0, 600.0]))
    assert late.ours > 256
    assert not late.holds
    (never,) = scaling.bound_claims(line([1000.0] * 9))
    assert never.verdict.words == "can't be judged: nowhere 5 % below its best"


def test_a_small_beginning_that_is_slower_is_not_a_loss():
    """The best may be anywhere: what counts is the scale behind which all is lower."""
    assert scaling.lost_at(scaling.line_of(line([900.0] + [1000.0] * 8), "fsdp"), 5.0) is None
    rates = [900.0, 1000.0, 1000.0, 900.0, 1000.0, 990.0, 980.0, 900.0, 800.0]
    found = scaling.lost_at(scaling.line_of(line(rates), "fsdp"), 5.0)
    assert 512 < found < 1024


# --- what becomes preferable ---


def crossing(**others):
    return line(falling(0.6)) + [r for name, rates in others.items() for r in line(rates, strategy=name)]


def preferable(records):
    return list(scaling.preferable_claims(records))


def test_the_scale_where_another_overtakes():
    records = crossing(**{"tp 2": [850.0] * 9, "tp 4": [750.0] * 9, "pp 2": [800.0] * 9, "hsdp": [900.0] * 9})
    tensor, pipeline, node = preferable(records)[:3]
    assert [claim.holds for claim in (tensor, pipeline, node)] == [True, True, True]
    assert tensor.ours == pytest.approx(256 * 2 ** (log(900 / 850) / log(900 / 800)))  # FSDP: 900 at 256, 800 at 512
    assert pipeline.ours == pytest.approx(512, rel=1e-6)
    assert node.ours == pytest.approx(256, rel=1e-6)
    assert "tp 2 from 358 on" in tensor.assumption
    assert "pp 4 never" in pipeline.assumption
    gains = preferable(records)[3:]
    assert [claim.ours for claim in gains[:3]] == pytest.approx([100 * (850 / 600 - 1), 100 / 3, 50.0])
    assert not gains[3].holds  # "free" is not there


def test_what_never_overtakes_does_not_hold():
    claims = preferable(crossing(**{"tp 2": [590.0] * 9, "pp 2": [None] * 9, "hsdp": [600.0] * 9}))
    assert not any(claim.holds for claim in claims)
    assert "tp 2 never" in claims[0].verdict.words
    assert claims[3].ours == pytest.approx(-100 / 60)
    assert claims[3].verdict.words.startswith("does not hold")
    assert claims[5].ours == 0  # as fast is not faster


def test_a_lead_that_is_lost_again_is_none():
    rates = [900.0] * 5 + [950.0, 950.0, 500.0, 500.0]
    assert scaling.overtakes(crossing(**{"tp 2": rates}), "fsdp", "tp 2") is None


def test_of_several_crossings_the_last_counts():
    rates = [1100.0, 900.0, 1100.0, 900.0, 900.0, 800.0, 700.0, 750.0, 750.0]
    found = scaling.overtakes(crossing(**{"tp 2": rates}), "fsdp", "tp 2")
    assert 512 < found < 1024


def test_what_is_always_faster_is_so_from_the_first_scale():
    assert scaling.overtakes(crossing(hsdp=[1500.0] * 9), "fsdp", "hsdp") == 8


# --- generations ---


def generations(old, new):
    rows = []
    for node, values in (("dgx-a100", old), ("dgx-h100", new)):
        for devices, mfu in zip(SCALES, values, strict=False):
            made = record(devices, None if mfu is None else 1.0, node=node)
            rows.append(Record(**{**made.as_json(), "mfu": mfu}))
    return list(scaling.utilization_claims(rows))


def test_utilization_falls_from_a100_to_h100():
    every, usual = generations([0.60, 0.58], [0.41, 0.40])
    assert every.holds
    assert every.ours == pytest.approx(-18.0)
    assert usual.holds
    assert usual.ours == pytest.approx(-18.5)


def test_utilization_that_rises_anywhere_does_not_hold():
    every, usual = generations([0.60, 0.58, 0.30], [0.41, 0.40, 0.31])
    assert every.ours == pytest.approx(1.0)
    assert not every.holds
    assert not usual.holds
    assert not any(claim.holds for claim in generations([0.6], [0.595]))


def test_without_a_common_scale_utilization_is_not_judged():
    assert [claim.ours for claim in generations([None, 0.6], [0.4, None])] == [None, None]


# --- strong scaling ---


def strong(rates):
    return list(scaling.strong_claims(line(rates, strategy="free", batch="512 in all")))


def test_strong_scaling_diminishes():
    claims = strong(falling(0.4, knee=16))
    assert all(claim.holds for claim in claims)
    assert claims[0].ours == pytest.approx(-60)
    last = (0.4 * 2048 - (0.4 + 0.6 / 7) * 1024) / 1024
    assert claims[2].ours == pytest.approx(100 * last)
    assert claims[2].ours == pytest.approx(claims[4].ours)  # a device costs the same everywhere


@pytest.mark.parametrize("rates", [[1000.0] * 9, [1000.0 + 10 * n for n in range(9)]])
def test_strong_scaling_that_does_not_diminish(rates):
    claims = strong(rates)
    assert [claim.holds for claim in claims] == [False, True, False, False, False]


def test_a_rise_on_the_way_is_seen():
    rates = falling(0.4)
    rates[6] *= 1.3
    claims = strong(rates)
    assert claims[0].holds
    assert not claims[1].holds


def test_one_scale_is_no_scaling():
    for rates in ([None] * 8 + [5.0], [None] * 9):
        assert [claim.ours for claim in strong(rates)] == [None] * 5


# --- knees ---


def shifted(*rates, by="seq_len", values=(4096, 8192, 16384)):
    records = [r for value, one in zip(values, rates, strict=False) for r in line(one, **{by: value})]
    return list(scaling.knee_claims(records, by, "context length"))


def test_longer_context_shifts_the_knee():
    (one, other) = shifted(falling(0.3), falling(0.3, knee=256), falling(0.9))
    assert one.holds
    assert one.unit == "x"
    assert one.ours > 1.2
    assert one.text == "The knee shifts right from 4,096 tokens to 8,192 tokens"
    assert other.holds  # the last has none: it lies beyond
    assert "beyond 2,048 devices" in other.text


def test_a_knee_that_shifts_left_or_stays_does_not_hold():
    for rates in ((falling(0.3, knee=256), falling(0.3)), (falling(0.9), falling(0.3)), (falling(0.3), falling(0.3))):
        (claim,) = shifted(*rates)
        assert not claim.holds
        assert claim.ours <= 1


def test_without_knees_what_is_lost_decides():
    (claim,) = shifted(falling(0.8), falling(0.9))
    assert claim.holds
    assert claim.unit == "points"
    assert claim.ours == pytest.approx(10.0)
    assert claim.text.startswith("Neither 4,096 tokens nor 8,192 tokens have a knee")
    (worse,) = shifted(falling(0.9), falling(0.85))
    assert worse.ours == pytest.approx(-5.0)
    assert not worse.holds


def test_knees_are_compared_where_both_fit():
    """The larger model needs 64 devices; from there it loses less than the smaller one, which had lost before."""
    late = [None] * 3 + [500.0, 500.0, 490.0, 480.0, 470.0, 460.0]
    (claim,) = shifted(falling(0.8), late, by="model", values=("llama2-7b", "llama2-70b"))
    assert claim.text.startswith("Neither llama2-7b nor llama2-70b have a knee")
    assert claim.ours == pytest.approx(100 * (460 / 500 - 0.8))


def test_what_fits_nowhere_is_not_judged():
    (claim,) = shifted(falling(0.8), [None] * 9)
    assert not claim.holds
    assert claim.verdict.words == "can't be judged: too few scales where both fit"


def test_small_scales_that_are_slow_for_want_of_memory_do_not_hide_a_loss():
    """The shorter context recomputes on 8 and 16 devices: from there it seems to lose nothing."""
    (claim,) = shifted([600.0, 600.0, *falling(0.7)[2:]], falling(0.9))
    assert claim.ours == pytest.approx(20.0)
    assert claim.holds


def test_without_the_works_range_nothing_says_what_is_lost():
    scales = (8, 16, 32)
    records = [r for tokens in (4096, 8192) for r in line([10.0, 9.9, 9.8], scales, seq_len=tokens)]
    (claim,) = scaling.knee_claims(records, "seq_len", "context length")
    assert claim.ours is None


# --- all ---


def test_every_ready_study_is_asked_for_by_name():
    asked = []

    def records(name):
        asked.append(name)
        return ()

    list(scaling.scaling_claims(records))
    assert asked == ["weak-scaling", "hardware", "strong-scaling", "context-length", "model-size"]


def test_claims_are_those_of_their_study():
    """Records under the wrong name change nothing elsewhere."""
    made = crossing(**{"tp 2": [850.0] * 9})
    found = by_text(scaling.scaling_claims(lambda name: made if name == "weak-scaling" else ()))
    assert found["Tensor parallelism of 2 or 4 becomes faster than FSDP for a 7B on H100: devices"].holds
    assert not any(claim.holds for text, claim in found.items() if "MFU" in text or "Strong" in text)
