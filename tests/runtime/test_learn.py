"""Rates are functions of the step; groups decay matrices only; the norm is that of one process, whatever the layout."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.plans import small_model

from wavetrain.base.errors import InputError, RunError
from wavetrain.runtime import learn as module
from wavetrain.runtime.chunk import Computed
from wavetrain.runtime.data import Sampling, microbatches, open_dataset
from wavetrain.runtime.learn import (
    ROW,
    SCHEDULES,
    AdamW,
    Held,
    Rate,
    clip,
    decay_groups,
    global_norm,
    learning_rate,
    optimizer_of,
    set_learning_rate,
    sum_of_squares,
)
from wavetrain.runtime.shared import WholeGradients, add_shared, groups_of
from wavetrain.runtime.stages import cut_into_stages, materialize
from wavetrain.runtime.transformer import parts_of

# --- learning rates ---


@st.composite
def rates(draw):
    steps = draw(st.integers(1, 300))
    return Rate(
        peak=draw(st.floats(1e-6, 1.0)),
        schedule=draw(st.sampled_from(sorted(SCHEDULES))),
        warmup=draw(st.integers(0, steps)),
        steps=steps,
        floor=draw(st.floats(0, 1)),
    )


@given(rates())
def test_a_rate_rises_to_its_peak_and_falls_to_its_floor(rate):
    values = [learning_rate(rate, step=step) for step in range(rate.steps + 5)]
    up, down = values[: rate.warmup], values[rate.warmup :]
    assert up == sorted(up)
    assert all(0 < value < rate.peak for value in up)
    assert down == sorted(down, reverse=True) or max(down) - min(down) < 1e-12 * rate.peak
    assert down[0] == pytest.approx(rate.peak, rel=1e-12)
    last = rate.peak * (1 if rate.schedule == "constant" else rate.floor)
    if rate.steps > rate.warmup:
        assert values[rate.steps :] == pytest.approx([last] * 5, rel=1e-9, abs=1e-16)


def test_rates_are_those_of_the_formulas():
    linear = Rate(peak=1.0, schedule="linear", warmup=3, steps=7)
    assert [learning_rate(linear, step=s) for s in range(8)] == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = Rate(peak=2.0, schedule="cosine", steps=4, floor=0.5)
    expected = [1 + 0.5 * (1 + math.cos(math.pi * s / 4)) for s in range(5)]
    assert [learning_rate(cosine, step=s) for s in range(5)] == pytest.approx(expected)
    assert learning_rate(Rate(peak=0.1), step=10**9) == 0.1


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"peak": math.nan}, "peak: nan"),
        ({"peak": -1.0}, "0 or more"),
        ({"peak": math.inf}, "finite"),
        ({"schedule": "cosin"}, "nearest: cosine"),
        ({"warmup": 11}, "from 0 to the 10 steps"),
        ({"warmup": -1}, "from 0 to the 10 steps"),
        ({"steps": 0}, "1 or more"),
        ({"floor": 1.5}, "share of the peak"),
    ],
)
def test_wrong_rates_are_refused(wrong, rule):
    with pytest.raises(InputError, match=rule):
        Rate(**({"peak": 1e-3, "steps": 10} | wrong))


# --- AdamW ---


def test_matrices_decay_and_vectors_do_not():
    parameters = {"b.bias": torch.zeros(3), "b.weight": torch.zeros(3, 3), "a.norm": torch.ones(3), "s": torch.ones(())}
    groups = decay_groups(parameters, weight_decay=0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    places = [[next(n for n, p in parameters.items() if p is q) for q in group["params"]] for group in groups]
    assert places == [["b.weight"], ["a.norm", "b.bias", "s"]]
    assert len(decay_groups({"w": torch.zeros(2, 2)}, weight_decay=0.1)) == 1  # torch refuses an empty group


def test_the_optimizer_takes_steps_at_the_rate_it_is_told():
    weight, bias = (torch.nn.Parameter(torch.ones(*shape)) for shape in ((2, 2), (2,)))
    optimizer = optimizer_of({"w": weight, "b": bias}, AdamW(weight_decay=0.5))
    for parameter in (weight, bias):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(weight, torch.ones(2, 2))  # no rate, no step
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    assert torch.equal(weight, torch.full((2, 2), 1 - 0.1 * 0.5))
    assert torch.equal(bias, torch.ones(2))


# --- the global norm ---


def gradients(sizes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {f"p{i}": torch.randn(size, generator=generator, dtype=dtype) for i, size in enumerate(sizes)}


def on_ranks(held, *, names, most):
    """Every rank's norm, each in a thread; sums go in the order of ranks."""
    barrier, given_in, results = threading.Barrier(len(held)), [None] * len(held), [None] * len(held)

    def rank(number):
        def add(tensor):
            given_in[number] = tensor.clone()
            barrier.wait()
            tensor.copy_(sum(given_in[1:], given_in[0]))

        try:
            turned = names[number % len(names) :] + names[: number % len(names)]  # each rank may list them its own way
            results[number] = clip(held[number], names=turned, most=most, add_over_ranks=add)
        except RunError as error:
            results[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(held))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@given(sizes, st.integers(1, 4), st.floats(1e-3, 1e3), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_whole_parameters_anywhere_give_the_bits_of_one_process(sizes, ranks, most, random):
    whole = gradients(sizes)
    expected = {name: gradient.clone() for name, gradient in whole.items()}
    norm = clip([Held(name, g) for name, g in expected.items()], names=list(whole), most=most)
    homes = {name: random.randrange(ranks) for name in whole}
    copies = [{name: g.clone() for name, g in whole.items() if random.random() < 0.5} for _ in range(ranks)]
    held = []
    for rank in range(ranks):
        mine = copies[rank] | {name: whole[name].clone() for name, home in homes.items() if home == rank}
        items = [Held(name, g, counts=homes[name] == rank) for name, g in mine.items()]
        random.shuffle(items)
        held.append(items)
    assert on_ranks(held, names=list(whole), most=most) == [norm] * ranks
    assert all(torch.equal(item.gradient, expected[item.name]) for items in held for item in items)


@given(sizes, st.integers(1, 4), st.floats(1e-3, 1e3))
@settings(max_examples=40, deadline=None)
def test_shards_give_the_same_norm(sizes, ranks, most):
    whole = gradients(sizes, dtype=torch.float64)
    shards = {name: gradient.chunk(ranks) for name, gradient in whole.items()}
    held = [[Held(name, cut[rank]) for name, cut in shards.items() if rank < len(cut)] for rank in range(ranks)]
    flat = torch.cat(list(whole.values()))
    expected = flat.norm().item()
    norms = on_ranks(held, names=list(whole), most=most)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(expected, rel=1e-14)
    clipped = torch.cat(list(whole.values()))  # shards are views
    assert clipped.norm().item() == pytest.approx(min(expected, most), rel=1e-12)


def test_clipping_is_torchs_own():
    parameters = [torch.nn.Parameter(torch.empty(0)) for _ in range(5)]
    made = gradients([100, 7, 3, 20, 1], dtype=torch.float64)
    for parameter, gradient in zip(parameters, made.values(), strict=True):
        parameter.data = torch.zeros_like(gradient)
        parameter.grad = gradient.clone()
    theirs = torch.nn.utils.clip_grad_norm_(parameters, 1.5)
    ours = clip([Held(name, g) for name, g in made.items()], names=list(made), most=1.5)
    assert ours == pytest.approx(theirs.item(), rel=1e-14)
    for parameter, gradient in zip(parameters, made.values(), strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-6)  # they add 1e-6 to the norm they divide by


def test_a_small_norm_changes_nothing():
    made = gradients([50])
    before = made["p0"].clone()
    norm = clip([Held("p0", made["p0"])], names=["p0"], most=100.0)
    assert torch.equal(before, made["p0"])
    assert norm == pytest.approx(before.double().norm().item(), rel=1e-14)


@pytest.mark.parametrize("size", [0, 1, ROW - 1, ROW, 5 * ROW + 3])
def test_neither_blocks_nor_threads_nor_layout_change_the_sum(size, monkeypatch):
    values = gradients([size])["p0"].to(torch.bfloat16)
    expected = sum_of_squares(values)
    assert expected == pytest.approx(values.double().square().sum().item(), rel=1e-13)
    monkeypatch.setattr(module, "BLOCK", 2 * ROW)
    assert sum_of_squares(values) == expected
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert sum_of_squares(values.repeat(9)) == pytest.approx(9 * expected, rel=1e-13)
        many = sum_of_squares(values.repeat(9))
        torch.set_num_threads(1)
        assert sum_of_squares(values.repeat(9)) == many
    finally:
        torch.set_num_threads(threads)


def test_a_sum_is_rounded_once():
    values = torch.zeros(5, ROW)
    values[0, 0] = 2.0**27
    values[1:, 0] = 1.0  # each too small to change the sum alone
    assert sum_of_squares(values) == sum_of_squares(values.flip(0)) == 2**54 + 4


def test_the_values_are_not_touched_by_the_norm():
    values = gradients([100], dtype=torch.float64)["p0"].view(10, 10).t()  # strided, and float64 already
    before = values.clone()
    sum_of_squares(values)
    assert torch.equal(values, before)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_a_gradient_that_is_not_finite_is_named_on_every_rank(value):
    bad = torch.tensor([1.0, value], dtype=torch.float64)
    held = [[Held("a", torch.ones(3))], [Held("b", bad)], []]
    messages = on_ranks(held, names=["a", "b"], most=1.0)
    assert len(set(messages)) == 1
    assert "the gradient of b is not finite" in messages[0]
    assert torch.equal(held[0][0].gradient, torch.ones(3))


def test_large_finite_squares_do_not_overflow_silently():
    held = [Held(name, torch.tensor([1.2e154], dtype=torch.float64)) for name in "abc"]
    assert global_norm(held, names=["a", "b", "c"]) == math.inf


def test_one_gradient_under_two_names_is_scaled_once():
    shared = torch.full((4,), 2.0)
    norm = clip([Held("a", shared), Held("b", shared, counts=False)], names=["a"], most=1.0)
    assert norm == 4.0
    assert torch.equal(shared, torch.full((4,), 0.5))


# --- all of it, on a text ---


def learn(parts, cut, path, *, steps):
    """Losses and norms of a run in this process, its model cut into stages."""
    stages = cut_into_stages(parts, cut, range(len(cut)))
    materialize(stages, seed=3)
    chunks = [Computed(stage) for stage in stages.values()]
    placement = SimpleNamespace(num_stages=len(cut), depth=len(cut), ranks=[0] * len(cut))
    groups = groups_of({n: [name for name, _ in s.named()] for n, s in stages.items()}, parts.ties, placement)
    names = sorted({parts.ties.get(name, name) for name, _ in parts.named()})
    parameters = {p.data_ptr(): (name, p) for stage in stages.values() for name, p in stage.named()}  # tied ones once
    optimizer = optimizer_of(dict(parameters.values()), AdamW())
    rate = Rate(peak=1e-2, schedule="cosine", warmup=3, steps=steps)
    dataset = open_dataset(path, vocab=parts.vocab, seq_len=16)
    sampling = Sampling(seed=1, seq_len=16, global_batch=8)
    seen = []
    for step in range(steps):
        batch = microbatches(dataset, sampling, step=step, microbatch=4)
        for chunk in chunks:
            chunk.begin(batch)
        for m in batch.tokens:
            passed = None
            for chunk in chunks:
                passed = chunk.forward(m, passed)
            passed = None
            for chunk in reversed(chunks):
                passed = chunk.backward(m, passed)
        gradients = {number: WholeGradients(stage) for number, stage in stages.items()}
        add_shared(groups, gradients, placement, 0, SimpleNamespace(finish=lambda: None))
        pairs = [(parts.ties.get(name, name), p.grad) for stage in stages.values() for name, p in stage.named()]
        held = [
            Held(name, g, counts=all(name != other for other, _ in pairs[:at])) for at, (name, g) in enumerate(pairs)
        ]
        norm = clip(held, names=names, most=0.5)
        set_learning_rate(optimizer, learning_rate(rate, step=step))
        optimizer.step()
        for stage in stages.values():
            stage.zero_grad(set_to_none=True)
        seen.append((float(sum(chunks[-1].losses.values())), norm))
    return seen


@pytest.mark.parametrize("tied", [False, True])
def test_a_text_is_learnt_and_every_cut_learns_the_same(tmp_path, tied):
    path = tmp_path / "text"
    path.write_text("the cat sat on the mat. " * 40)
    parts = parts_of(small_model(blocks=3, vocab=256, tied=tied))
    whole = learn(parts, (3,), path, steps=25)
    assert whole[-1][0] < 0.5 * whole[0][0]
    assert whole[0][1] > 0.5  # so clipping had something to do
    for cut in ((1, 2), (1, 1, 1)):
        assert learn(parts, cut, path, steps=25) == whole
