"""Sentences: each is there when the records show it and not otherwise, with their numbers."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from made import FAILURES, record, records, study

from wavetrain.sim.breakdown import TERMS
from wavetrain.study.scaling.findings import MOST_SETTINGS, binding, exposed_share, findings

HALF = {8: 80.0, 16: 120.0, 32: 130.0}  # 50 %, then 6 %


def said(given_, **more):
    return findings(study(**more), given_)


def about(given_, word, **more):
    return [text for text in said(given_, **more) if word in text]


# --- what binds ---


def test_the_largest_beside_compute_binds():
    assert binding({"compute": 9.0, "sharding": 0.3, "bubble": 0.7}) == "bubble"
    assert binding({"compute": 1.0, "sharding": 9.0}) == "sharding"


def test_less_than_two_percent_does_not():
    assert binding({"compute": 98.0, "sharding": 2.0}) == "sharding"
    assert binding({"compute": 98.1, "sharding": 1.0, "bubble": 0.9}) == "compute"
    assert binding({"compute": 1.0}) == "compute"
    assert binding({}) == "compute"


def test_exposed_is_communication():
    terms = dict.fromkeys(TERMS, 1.0)
    assert exposed_share(terms) == pytest.approx(6 / len(TERMS))
    assert exposed_share({"compute": 3.0, "tensor": 1.0}) == 0.25
    assert exposed_share({"compute": 3.0, "bubble": 1.0, "stragglers": 1.0, "recompute": 1.0}) == 0.0
    assert exposed_share({}) == 0.0


@given(st.dictionaries(st.sampled_from(sorted(TERMS)), st.floats(1e-6, 1e3)))
def test_shares_of_any_step(terms):
    assert 0 <= exposed_share(terms) <= 1 + 1e-12
    assert binding(terms) in {*terms, "compute"}


# --- of one strategy ---


def test_the_loss_of_the_third_work():
    given_ = [record(128, 128 * 10_000.0, watts=658.0), record(2048, 2048 * 6_278.0, watts=619.4)]
    assert said(given_)[0] == (
        "fsdp: from 128 to 2,048 devices tokens/s per device fall by 37.2 % (10,000 to 6,278), "
        "power per device falls by 5.9 % (658 to 619.4 W) and tokens per joule fall by 33.3 % (15.2 to 10.14)."
    )


def test_without_power_nothing_is_said_of_it():
    (loss,) = about(records({8: 80.0, 16: 200.0}), "tokens/s per device")
    assert loss == "fsdp: from 8 to 16 devices tokens/s per device rise by 25.0 % (10 to 12.5)."


def test_what_does_not_change():
    (loss,) = about([record(8, 80.0, watts=500.0), record(16, 160.0, watts=500.0)], "power")
    assert "tokens/s per device stay the same (10), power per device stays the same (500 W)" in loss


def test_one_scale_has_no_change_and_no_step():
    assert said([record(8, 80.0)]) == ()
    assert said([]) == ()


def test_a_knee_is_told_with_its_step():
    (text,) = about(records(HALF), "further device", stop_below=0.25)
    assert text == (
        "fsdp: from about 17 devices on a further device gives less than 25 % "
        "of what each of the first 8 devices gives; the step from 16 to 32 is the first that does not pay."
    )


def test_no_knee_is_told_with_the_least_return():
    (text,) = about(records(HALF), "further device", stop_below=0.0625)
    assert text == (
        "fsdp: every step up to 32 devices pays: the least that a further device gives is 6.2 % "
        "of what each of the first 8 devices gives."
    )


def test_a_first_device_is_one():
    (text,) = about(records({1: 10.0, 2: 20.0}), "further device")
    assert text.endswith("a further device gives is 100 % of what one device gives.")
    (text,) = about(records({1: 10.0, 2: 20.0}), "last step")
    assert text.endswith("of what the first device gives.")


def test_failures_move_the_knee():
    falling = [record(8, 80.0, good=1.0), record(16, 160.0, good=0.6), record(32, 320.0, good=0.3)]
    (text,) = about(falling, "further device")
    assert text.startswith("fsdp: every step up to 32 devices pays")
    assert text.endswith(" devices gives, but with failures less than 50 % from about 10 devices on.")
    sooner = [record(n, rate, good=good) for (n, rate), good in zip(HALF.items(), (1.0, 0.9, 0.8), strict=True)]
    (text,) = about(sooner, "further device", stop_below=0.25)
    assert "; with failures this begins at about 14." in text
    alike = [record(n, rate, good=0.9) for n, rate in HALF.items()]
    (text,) = about(alike, "further device", stop_below=0.25)
    assert "failures" not in text


def test_the_last_step():
    given_ = [record(8, 80.0, watts=500.0), record(16, 120.0, watts=400.0)]
    (text,) = about(given_, "last step")
    assert text == (
        "fsdp: the last step, from 8 to 16 devices, gives 50 % per device, 83 % per watt and 50 % per dollar "
        "of what the first 8 devices give."
    )
    (text,) = about(records({8: 80.0, 16: 72.0}), "last step")
    assert "gives -10 % per device" in text


def test_only_the_first_and_the_best_are_told_in_full():
    given_ = [
        *records({8: 80.0, 16: 100.0}),
        *records({8: 70.0, 16: 90.0}, strategy="slow"),
        *records({8: 60.0, 16: 120.0}, strategy="late"),
    ]
    assert [text.partition(":")[0] for text in about(given_, "last step")] == ["fsdp", "late"]
    assert len(about(given_, "tokens/s per device fall")) == 3  # the third is the best of each scale
    assert len(about(given_, "further device")) == 4


def test_what_binds_at_the_ends():
    given_ = [
        record(8, 80.0, terms={"compute": 9.6, "sharding": 0.1, "bubble": 0.3}),
        record(16, 90.0, terms={"compute": 6.0, "sharding": 4.0}),
    ]
    (text,) = about(given_, "beside compute")
    assert text == (
        "fsdp: at 16 devices sharding (gather and scatter) costs most beside compute, 40 % of a step; at 8 it is 1 %."
    )
    (text,) = about(given_[1:], "beside compute")
    assert text.endswith("40 % of a step.")
    (text,) = about([record(8, 80.0, terms={"compute": 1.0})], "beside compute")
    assert text == "fsdp: at 8 devices nothing beside compute costs 2 % of a step."
    (text,) = about([record(8, 80.0, terms={"compute": 1.0, "other": 1.0})], "beside compute")
    assert "at 8 devices other costs most" in text


def test_what_does_not_fit():
    assert said([record(8), record(16, 1.0)]) == ("fsdp: nothing fits on 8 devices.",)
    assert said([record(1), record(2)]) == ("fsdp: nothing fits at any scale (1 and 2 devices).",)
    assert said([record(1)]) == ("fsdp: nothing fits at any scale (1 device).",)
    many = [record(2**power) for power in range(10)]
    assert "1, 2, 4, 8, 16, 32 and 4 further numbers of devices" in said(many)[0]
    assert not about(records(HALF), "fits")
    late = record(8, why="no plan was found in 60 s; more time with time_limit_s")
    assert said([late]) == ("fsdp: time ran out before a plan was found on 8 devices.",)
    assert said([late, record(16)])[0] == "fsdp: nothing fits on 16 devices."


# --- of several ---


def two(ones, others, **more):
    return [*records(ones, **more), *records(others, strategy="tp 2", **more)]


def test_where_the_best_changes():
    found = said(two({8: 2.0, 16: 2.0, 32: 2.0}, {8: 1.0, 16: 1.0, 32: 4.0}))
    assert "fsdp is the fastest from 8 to 16 and tp 2 is the fastest at 32 devices." in found
    assert "tp 2 overtakes fsdp at about 23 devices (computed at 16 and 32)." in found
    assert any(text.startswith("with the best strategy at each scale: from 8 to 32 devices tokens/s") for text in found)


def test_where_it_does_not():
    found = said(two({8: 2.0, 16: 2.0}, {8: 1.0, 16: 1.0}))
    assert "fsdp is the fastest from 8 to 16 devices." in found
    assert not any("overtakes" in text or "takes over" in text or "best strategy" in text for text in found)


def test_one_strategy_is_not_compared():
    assert not about(records(HALF), "fastest")
    assert not about(two({8: None}, {8: None}), "fastest")


def test_one_that_fits_later_takes_over():
    found = said(two({8: None, 16: 4.0}, {8: 1.0, 16: 2.0}))
    assert "fsdp takes over from tp 2 at 16 devices: fsdp does not fit on 8." in found
    found = said(two({8: 4.0, 16: None}, {8: 1.0, 16: 2.0}))
    assert "tp 2 takes over from fsdp at 16 devices: fsdp does not fit on 16." in found


def test_energy_is_compared_in_tokens_per_joule():
    ones = records({8: 80.0, 16: 160.0}, watts=100.0, objective="energy")
    others = records({8: 70.0, 16: 150.0}, watts=50.0, objective="energy", strategy="tp 2")
    assert "tp 2 gives most tokens per joule from 8 to 16 devices." in said([*ones, *others])


def test_settings_are_told_apart_by_what_differs():
    found = said([*records(HALF), *records(HALF, model="x")])
    assert len([text for text in found if text.startswith("m: fsdp: ")]) == len(found) / 2
    assert len([text for text in found if text.startswith("x: fsdp: ")]) == len(found) / 2
    found = said([*records(HALF), *records(HALF, seq_len=8192, batch="64 in all")])
    assert found[0].startswith("4,096 tokens, 2 per device: fsdp: ")
    assert found[-1].startswith("8,192 tokens, 64 in all: fsdp: ")


def test_very_many_settings_are_counted():
    found = said([one for length in range(MOST_SETTINGS + 5) for one in records(HALF, seq_len=length)])
    assert found[-1] == "5 further settings are in the records only."
    assert sum("tokens/s per device" in text for text in found) == MOST_SETTINGS


# --- failures and other hardware ---

FAILING = record(2048, 1.0, good=0.952, interval_s=423.4, checkpoint_bytes=80 * 2**30)


def test_what_failures_cost():
    (text,) = about([FAILING], "failures", failures=FAILURES)
    assert text == (
        "fsdp: on 2,048 devices failures cost 4.8 % of the time, with one every 24.4 h on average "
        "and a checkpoint (80 GiB) every 7.06 min."
    )


def test_no_failures_cost_nothing():
    assert not about([FAILING], "failures")
    assert not about([record(8, 1.0)], "failures", failures=FAILURES)


@pytest.mark.parametrize(("devices", "words"), [(8, "260 days"), (50_000, "60 min"), (10**6, "3 min"), (10**7, "18 s")])
def test_times_are_told_in_their_unit(devices, words):
    (text,) = about([record(devices, 1.0, good=0.5)], "failures", failures=FAILURES)
    assert text.endswith(f"with one every {words} on average.")


def test_what_helps_most():
    changes = {"peak x2": 1.4, "latency /2": 1.1, "price /2": 2.0}
    given_ = [record(8, 1.0, elasticity={"peak": 0.3, "network_latency": -0.62}, what_if=changes)]
    assert said(given_) == (
        "fsdp: on 8 devices throughput depends most on network_latency: "
        "1 % less gives 0.62 % more tokens/s with the same plan.",
        "fsdp: on 8 devices peak x2 would help most of the changes tried: 1.40 times the tokens/s, planned again.",
    )


def test_what_helps_nothing():
    given_ = [record(8, 1.0, elasticity={"peak": 0.0}, what_if={"peak x2": 1.001, "latency /2": 1.0, "price /2": 2.0})]
    assert said(given_) == ("fsdp: on 8 devices none of the changes tried would help: peak x2 and latency /2.",)
    assert said([record(8, 1.0, what_if={"price /2": 2.0})]) == ()


def test_it_is_the_best_at_the_largest_scale_that_is_told():
    given_ = two({8: 2.0, 16: 2.0}, {8: 1.0, 16: 4.0}, good=0.5)
    (text,) = about(given_, "failures cost", failures=FAILURES)
    assert text.startswith("tp 2: on 16 devices")


# --- names ---

HOSTILE = ["</script><img onerror=x>", "a\u2028b", "\"quoted\" '%'", "{devices:%s}", "100% \\n", ""]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_passed_on_as_they_are(name):
    ones = [
        record(8, 80.0, watts=1.0, good=0.9, strategy=name, model=name),
        record(16, 100.0, strategy=name, model=name),
    ]
    plain = [replace(one, strategy="plain", model="plain") for one in ones]
    found = said(ones, failures=FAILURES)
    assert found
    assert all(text.startswith(f"{name}: ") for text in found)
    expected = said(plain, failures=FAILURES)
    assert [text.removeprefix(f"{name}: ") for text in found] == [text.removeprefix("plain: ") for text in expected]
