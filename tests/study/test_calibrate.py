"""Constants that were put into samples come out of them."""

from dataclasses import replace

import numpy as np
import pytest

from wavetrain.cluster import load_cluster, write_cluster
from wavetrain.cluster.cluster import achieved
from wavetrain.cluster.laws import load_laws
from wavetrain.runtime.measure_compute import HEADS, LOGITS, LOOKUPS, PRODUCTS, STREAMS
from wavetrain.runtime.samples import (
    AGAIN,
    ALONE,
    BACKWARD,
    DEEP,
    EMPTY,
    FORWARD,
    MODELS,
    OPTIMIZER,
    RECOMPUTED,
    REPLICAS,
    REST,
    SHARDED,
    Sample,
    Small,
    joint_cases,
    step_case,
)
from wavetrain.sim.predict import simulate
from wavetrain.study.assemble import assemble
from wavetrain.study.calibrate import (
    Calibrated,
    calibrate_compute,
    fitted,
    held,
    in_whole_models,
    product_law,
    small_seconds,
)
from wavetrain.study.calibrate_network import calibrate_network
from wavetrain.study.calibrate_steps import GATHERED, IN_COMPANY, _longer, _slower, _start, in_whole_steps, instant

RATE, INNER_HALF, START_S = 60e9, 8.0, 8e-6
PER_ELEMENT_S = {"norm": 0.5e-9, "activation": 1.1e-9, "gated": 1.6e-9, "residual": 0.2e-9, "rotary": 1.3e-9}
PER_ELEMENT_S |= {"lookup": 0.3e-9, "logits": 1.2e-9, "rms-norm": 0.9e-9}
SLOWER = 1.7  # backward
ATTENTION_RATE, ATTENTION_BACKWARD = 25e9, 2.5
MEMORY_RATE = 20e9
PARAMETER_S, TENSOR_S = 3e-9, 60e-6
LIKE = load_cluster("cpu-host").device


def streams():
    sizes = {name: [(rows * width,) for rows, width in STREAMS["cpu"]] for name in PER_ELEMENT_S}
    sizes |= {"lookup": list(LOOKUPS), "logits": list(LOGITS)}
    for name, each in sizes.items():
        for size in each:
            seconds = START_S + PER_ELEMENT_S[name] * float(np.prod(size))
            yield Sample(f"{name}-forward", size, seconds)
            yield Sample(f"{name}-backward", size, SLOWER * seconds)


def products():
    for rows, width in PRODUCTS:
        for outputs in (width, 4 * width):
            flops, result = 2 * rows * outputs * width, rows * (outputs + width)
            once = START_S + (flops + INNER_HALF * result) / RATE
            weight = START_S + (flops + INNER_HALF * 2 * outputs * width) / RATE
            for what, seconds in (("", once), ("-fixed", once)):
                yield Sample(f"gemm{what}-{'backward' if what else 'forward'}", (rows, outputs, width), seconds)
            yield Sample("gemm-backward", (rows, outputs, width), once + weight)


def others():
    for batch, heads, length, dim in HEADS:
        seconds = START_S + 2 * batch * heads * length**2 * dim / ATTENTION_RATE
        yield Sample("attention-forward", (batch, heads, length, dim), seconds)
        yield Sample("attention-backward", (batch, heads, length, dim), ATTENTION_BACKWARD * seconds)
    for size in (2**18, 2**19):
        yield Sample("copy", (size,), size / MEMORY_RATE)
        yield Sample("accumulate", (size,), size * 0.2e-9)
    for tensors, each in ((4, 2**21), (16, 2**18), (96, 2**10)):
        yield Sample(OPTIMIZER, (tensors * each, tensors), tensors * each * PARAMETER_S + tensors * TENSOR_S)


def operators(noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    made = [*streams(), *products(), *others()]
    return [replace(one, seconds=one.seconds * generator.uniform(1 - noise, 1 + noise)) for one in made]


def in_models(device, laws):
    """Small models that take what these constants say."""
    for small in MODELS:
        for phase, value in zip((FORWARD, BACKWARD), small_seconds(small, device, laws), strict=True):
            yield small.sample(phase, value)
    yield DEEP.sample(AGAIN, sum(small_seconds(DEEP, device, laws, RECOMPUTED)))


def in_steps(step_s, share):
    """What steps of small models take once, of which a share of what tensors and parameters take is the optimizer's."""
    for small in MODELS:
        parameters, tensors = held(small)
        held_s = parameters * PARAMETER_S + tensors * TENSOR_S
        yield small.sample(OPTIMIZER, share * held_s)
        yield small.sample(REST, step_s + (1 - share) * held_s)


def calibrated(samples):
    return calibrate_compute(samples, name="core", title="a core", memory_bytes=2**33, like=LIKE)


@pytest.fixture(scope="module")
def found():
    """Operators and models agree, but for a gap that only models have."""
    first = calibrated([*operators(), MODELS[0].sample(FORWARD, 0.01), MODELS[0].sample(BACKWARD, 0.01)])
    truth = Calibrated(replace(first.device, peak=replace(first.device.peak, fp32=RATE)), first.laws, {})
    truth = replace(truth, laws=replace(truth.laws, gap_s=25e-6, recompute_gap_s=4e-4))
    return truth, calibrated([*operators(), *in_models(truth.device, truth.laws)])


def test_rates_of_the_device(found):
    _, seen = found
    assert seen.device.peak.fp32 == pytest.approx(RATE, rel=1e-3)
    assert seen.device.memory_bytes_per_s == pytest.approx(MEMORY_RATE)
    assert seen.device.vector_inner_half == pytest.approx(INNER_HALF, rel=1e-3)
    assert seen.device.attention.flash2 * RATE == pytest.approx(ATTENTION_RATE, rel=1e-3)
    assert (seen.device.usd_per_hour, seen.device.busy_w) == (LIKE.usd_per_hour, LIKE.busy_w)


def test_constants_of_the_software(found):
    _, seen = found
    laws = seen.laws
    assert laws.forward_bytes[0] == pytest.approx(PER_ELEMENT_S["norm"] * MEMORY_RATE, rel=1e-3)
    assert laws.backward_bytes[0] == pytest.approx(SLOWER * PER_ELEMENT_S["norm"] * MEMORY_RATE, rel=1e-3)
    assert laws.attention_backward == pytest.approx(ATTENTION_BACKWARD, rel=1e-3)
    assert laws.optimizer_bytes / MEMORY_RATE == pytest.approx(PARAMETER_S, rel=1e-3)
    assert laws.tensor_step_s == pytest.approx(TENSOR_S, rel=1e-3)
    assert laws.gap_s == pytest.approx(25e-6, rel=1e-3)
    assert laws.recompute_gap_s == pytest.approx(4e-4, rel=1e-3)
    assert laws.step_s == load_laws().step_s, "no step was timed"
    assert max(seen.residuals.values()) < 1e-3


def test_what_steps_take_once_is_told_apart(found):
    """By whole steps alone, as on a processor: some of what tensors take is outside the optimizer's call."""
    truth, _ = found
    made = [one for one in operators() if one.what != OPTIMIZER]
    laws = calibrated([*made, *in_models(truth.device, truth.laws), *in_steps(7e-4, 0.6)]).laws
    assert laws.step_s == pytest.approx(7e-4, rel=1e-3)
    assert laws.tensor_step_s == pytest.approx(TENSOR_S, rel=1e-3)
    assert laws.optimizer_bytes / MEMORY_RATE == pytest.approx(PARAMETER_S, rel=1e-3)


def test_models_decide_where_operators_are_faster_alone(found):
    truth, seen = found
    slower = replace(truth.device, peak=replace(truth.device.peak, fp32=RATE / 1.3))
    again = in_whole_models(seen, list(in_models(slower, truth.laws)))
    assert again.device.peak.fp32 == pytest.approx(RATE / 1.3, rel=1e-3)
    assert again.laws.gap_s == pytest.approx(truth.laws.gap_s, rel=1e-2)


def in_bf16(samples):
    """The same operators in a format whose products are ten times as fast, and all else is slower."""
    for one in samples:
        if one.what not in ("copy", "accumulate", OPTIMIZER):
            yield replace(one, dtype="bf16", seconds=one.seconds * (0.1 if one.what.startswith("gemm") else 4.0))


def test_what_all_formats_share_is_that_of_the_format_that_is_trained(found):
    """Attention is a share of each format's peak, and streams have no format: fp32, which models were timed in."""
    truth, seen = found
    models = list(in_models(truth.device, truth.laws))
    both = calibrated([*operators(), *in_bf16(operators()), *models])
    assert both.device.peak.bf16 == pytest.approx(10 * RATE, rel=1e-3)
    assert both.device.inner_half == pytest.approx(INNER_HALF, rel=1e-3)  # of 16 bits alone
    assert replace(both.device, peak=seen.device.peak, inner_half=seen.device.inner_half) == seen.device
    assert both.laws == seen.laws
    for small in MODELS:
        assert small_seconds(small, both.device, both.laws) == small_seconds(small, seen.device, seen.laws)


def alone(what, seconds):
    """Operators of which one kind takes `seconds`, whatever its size."""
    for one in operators():
        yield replace(one, seconds=seconds(one)) if one.what.startswith(what) else one


@pytest.mark.parametrize(
    ("what", "seconds"),
    [
        ("attention-forward", lambda _: 1e-3),  # no slope: as fast as can be said
        ("attention-forward", lambda one: 1e-9 * one.seconds),
        ("attention-forward", lambda one: 1e6 * one.seconds),
        ("gemm", lambda _: 1e-3),
        ("gemm", lambda one: 1e-9 * (one.sizes[0] * (one.sizes[1] + one.sizes[2]) + 2 * one.sizes[1] * one.sizes[2])),
        ("norm", lambda _: 1e-3),
        ("optimizer", lambda _: 1e-3),
    ],
)
def test_whatever_was_timed_a_file_of_it_is_read(found, tmp_path, what, seconds):
    truth, _ = found
    seen = calibrated([*alone(what, seconds), *in_models(truth.device, truth.laws)])
    cluster = assemble(
        "measured",
        seen.device,
        calibrate_network([], devices=1, hosts=1, tree=False),
        seen.laws,
        devices=1,
        hosts=1,
        base=LIKE,
    )
    write_cluster(cluster, tmp_path / "cluster.yaml")
    assert load_cluster(tmp_path / "cluster.yaml").device == cluster.device


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_five_percent_moves_predictions_by_less(found, seed):
    truth, _ = found
    generator = np.random.default_rng(seed)
    models = [
        replace(one, seconds=one.seconds * generator.uniform(0.95, 1.05)) for one in in_models(truth.device, truth.laws)
    ]
    seen = calibrated([*operators(0.05, seed), *models])
    for small in (Small(4, 96, 3, 1000, 128, 2), Small(3, 384, 6, 4000, 128, 1)):
        for ours, theirs in zip(
            small_seconds(small, seen.device, seen.laws), small_seconds(small, truth.device, truth.laws), strict=True
        ):
            assert ours == pytest.approx(theirs, rel=0.05)


def test_a_fit_has_no_weights_below_0():
    seconds = np.array([1.0, 0.9, 0.8])
    weights, _ = fitted([np.ones(3), np.array([1.0, 2.0, 3.0])], seconds)
    assert weights[1] == 0
    assert weights[0] == pytest.approx(0.88, abs=0.02)


# --- whole steps ---


def at_worst(ranks):
    """Processors that hide nothing."""
    base = load_cluster(f"cpu-host:{(ranks + 1) // 2}").part(ranks)
    return replace(base, own_laws=replace(base.laws, link_exposed=1.0, network_exposed=1.0))


def predicted(case, cluster):
    return simulate(case.plan(instant(cluster) if case.what == EMPTY else cluster.part(case.ranks))).step_s


def measured(cases, truth):
    return [Sample(case.what, case.sizes, predicted(case, truth), ranks=case.ranks) for case in cases]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("slower", [0.0, 0.7])
def test_steps_are_predicted_as_they_were_measured(ranks, slower):
    base = at_worst(ranks)
    late = replace(base.laws, step_s=base.laws.step_s + 0.002, message_s=0.0, gradient_exposed=1.0)
    truth = _longer(base)(replace(base, own_laws=late), 1.4)
    truth = _start(base, GATHERED)(_slower(base, IN_COMPANY)(truth, slower), 0.0009)
    together = [case for case in joint_cases(ranks) if case.ranks > 1]
    samples = measured(together, truth) + measured([case for case in joint_cases(ranks) if case.ranks == 1], base)
    assert {sample.what for sample in samples} == {ALONE, SHARDED, REPLICAS, EMPTY}
    seen = in_whole_steps(base, samples)
    for sample in samples:
        if sample.ranks > 1:
            assert predicted(step_case(sample), seen) == pytest.approx(sample.seconds, rel=2e-3)
    for one, other in zip(seen.tiers[0].kinds, truth.tiers[0].kinds, strict=True):
        assert one.efficiency == pytest.approx(other.efficiency, rel=0.02)
    for one, other in zip(seen.tiers, truth.tiers, strict=True):
        assert achieved(one, "send").latency_s == pytest.approx(achieved(other, "send").latency_s, rel=0.02)
    assert seen.laws.message_s == 0
    assert seen.laws.step_s == pytest.approx(truth.laws.step_s, rel=0.02)
    assert seen.laws.gradient_exposed == 1.0


def test_a_machine_that_computes_slower_does_not_exchange_slower():
    """What a rank alone takes longer than laws say is nothing that ranks exchange."""
    base = at_worst(2)
    truth = _slower(base, IN_COMPANY)(replace(base, own_laws=replace(base.laws, gradient_exposed=1.0)), 0.5)
    later = [replace(one, seconds=one.seconds + 0.01) for one in measured(joint_cases(2), truth) if one.what != EMPTY]
    seen = in_whole_steps(base, later)
    for one, other in zip(seen.tiers[0].kinds, truth.tiers[0].kinds, strict=True):
        assert one.efficiency == pytest.approx(other.efficiency, rel=0.02)


def test_one_rank_has_no_steps_with_others():
    assert joint_cases(1) == []
    base = at_worst(1)
    assert in_whole_steps(base, []) == base


def test_steps_that_take_forever_are_written_as_a_file_may_say_it(tmp_path):
    base = load_cluster("cpu-host:1").part(2)
    samples = [
        Sample(case.what, case.sizes, 1e3 if case.what == SHARDED else 0.05, ranks=case.ranks)
        for case in joint_cases(2)
    ]
    samples = [replace(one, seconds=5e5) if one.what == SHARDED and one.sizes[1] > 100 else one for one in samples]
    seen = in_whole_steps(base, samples)
    write_cluster(seen, tmp_path / "cluster.yaml")
    again = load_cluster(tmp_path / "cluster.yaml")
    assert min(one.efficiency for one in again.tiers[0].kinds if one.kind in GATHERED) >= 0.001


@pytest.mark.parametrize(
    ("true", "noise", "found_as"),
    [(8.0, 0.05, 8.0), (3.0, 0.05, 8.0), (16.0, 0.05, 8.0), (0.0, 0.0, 0.0), (128.0, 0.05, 128.0)],
)
def test_an_inner_size_is_the_usual_one_unless_another_pays(true, noise, found_as):
    generator, made = np.random.default_rng(1), []
    for rows, width in PRODUCTS:
        result = rows * 2 * width
        seconds = START_S + (result * width + true * result) / RATE
        made.append(Sample("gemm-forward", (rows, width, width), seconds * generator.uniform(1 - noise, 1 + noise)))
    assert product_law(made, "fp32").inner_half == found_as
