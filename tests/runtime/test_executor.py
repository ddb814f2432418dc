"""The executor against one process, bit for bit; memory by the schedule's count; order as planned; mutants caught."""

import random
import weakref
from dataclasses import replace

import pytest
import torch
from tests.runtime.pipeline import (
    BUILT_IN,
    FROM_TRANSFORMERS,
    Case,
    assert_equal,
    batch_of,
    live_counts,
    reference,
    run_threads,
    small,
)
from tests.soak import often
from torch.autograd.graph import get_gradient_edge

from wavetrain.plan.cut import even_cut
from wavetrain.runtime.backward import backward_input
from wavetrain.schedule import (
    SCHEDULES,
    Action,
    Actions,
    Kind,
    Shape,
    add_communication,
    add_recomputation,
    parse_text,
    verify,
)
from wavetrain.schedule.action import COMPUTE, SENDS

KINDS = [name for name in SCHEDULES if name != "forward-only"]
FAMILIES = (*BUILT_IN, *FROM_TRANSFORMERS)


def order(kind, ranks, microbatches, *, chunks=2, waves=1):
    schedule = SCHEDULES[kind]
    return schedule.order(Shape(ranks, microbatches, chunks=chunks if schedule.chunked else 1, waves=waves))


def cut_of(depth, uneven):
    """Blocks per stage: one each, or unequal with a first stage that has nothing but the embedding."""
    if not uneven:
        return (1,) * depth
    cut = list(even_cut(depth + 3, depth))
    if depth > 2:
        cut[0], cut[1] = 0, cut[1] + cut[0]
    return tuple(cut)


def case(family, actions, *, tied=False, recompute=False, uneven=False):
    cut = cut_of(actions.placement.depth, uneven)
    if recompute:
        actions = add_recomputation(actions, range(0, actions.placement.num_stages, 2))
    sizes = [1 + m % 2 for m in range(actions.num_microbatches)]  # unequal
    return Case(small(family, sum(cut), tied), cut, actions, batch_of(sizes))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_equal_one_process(family, kind):
    c = case(family, order(kind, 2, 4), tied=True, uneven=True)
    assert_equal(run_threads(c), reference(c))


def drawn(number):
    """A seeded draw of everything that a case has."""
    r = random.Random(number)
    kind, family = r.choice(KINDS), r.choice(FAMILIES)
    ranks = r.choice([2, 4, 8] if SCHEDULES[kind].even_ranks else [2, 3, 4, 8])
    waves = r.choice([1, 2, 3]) if SCHEDULES[kind].waved else 1
    few = ranks if SCHEDULES[kind].even_ranks else 1
    microbatches = r.choice([few, ranks, ranks + (0 if SCHEDULES[kind].even_ranks else 1), 2 * ranks])
    actions = order(kind, ranks, microbatches, chunks=r.choice([2, 3]), waves=waves)
    flags = {name: r.random() < 0.5 for name in ("tied", "recompute", "uneven")}
    return family, kind, actions, flags


@pytest.mark.parametrize("number", range(often(600, 16)))
def test_draws_equal_one_process(number):
    family, _, actions, flags = drawn(number)
    verify(actions)
    c = case(family, actions, **flags)
    result = run_threads(c)
    assert_equal(result, reference(c))
    check_order_and_memory(c.actions, result)


def check_order_and_memory(actions, result):
    """Executed as planned; and after every compute action as many activations held as the schedule says."""
    complete = add_communication(actions)
    for rank, moments in result.moments.items():
        expected = [str(action) for action in complete.ranks[rank] if not action.kind.value.startswith("RECV")]
        assert [moment.name for moment in moments] == expected
        computed = [moment for moment in moments if moment.lane == "compute"]
        assert [moment.live for moment in computed] == live_counts(complete, rank)
        assert all(moment.held_bytes > 0 for moment in computed if moment.live)


def test_a_parameter_that_no_one_uses_is_not_shared():
    """An untied BERT has a bias that is in no sum; its two copies have nothing to add."""
    c = case("bert", order("chimera", 2, 4))
    assert_equal(run_threads(c), reference(c))


def test_a_weight_that_is_used_twice_has_both_gradients():
    """The chain is walked once more for it, after the branches of the others."""
    a, b, s = (torch.nn.Linear(4, 4) for _ in range(3))
    x, gradient = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)

    def run():
        return s(torch.tanh(b(torch.tanh(s(torch.tanh(a(x)))))))

    parameters = [*a.parameters(), *b.parameters(), *s.parameters()]
    expected = torch.autograd.grad(run(), [x, *parameters], gradient)
    result, deferred = backward_input(get_gradient_edge(run()), gradient, x)
    deferred.finish()
    for found, right in zip([result, *(p.grad for p in parameters)], expected, strict=True):
        assert torch.equal(found, right)


def test_out_of_order_microbatches_have_right_gradients():
    """PyTorch 2.13 runs this order and gets the gradients wrong (hanayo-and-pipelines.md, appendix B)."""
    text = "0F1,0F0,2F1,2F0,2B1,2B0,0B1,0B0\n1F1,1F0,3F1,3F0,3B1,3B0,1B1,1B0\n"
    c = case("llama", parse_text(text, file="appendix B"))
    assert_equal(run_threads(c), reference(c))


def test_evaluation_holds_nothing():
    actions = order("forward-only", 2, 4)
    result = run_threads(case("gpt", actions), training=False)
    assert all(moment.live == 0 for moments in result.moments.values() for moment in moments)
    c = case("gpt", actions)
    expected = reference(replace(c, actions=order("wave", 2, 4)))
    assert all(torch.equal(result.losses[m], expected.losses[m]) for m in expected.losses)


def test_two_waves_peak_at_no_more_than_1f1b_plus_one_chunk():
    """In activations of whole ranks: a chunk of two waves is a quarter of a rank's stage in 1F1B."""
    ranks, count = 4, 8
    plain = run_threads(case("gpt", order("1f1b", ranks, count)))
    wave = run_threads(case("gpt", order("wave", ranks, count, waves=2)))
    most = max(m.live for moments in plain.moments.values() for m in moments)
    assert max(m.live for moments in wave.moments.values() for m in moments) <= 4 * most + 1


class Box:
    """Stands for a tensor that autograd saved; dies with it."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("kind", ["1f1b", "wave-zb"])
def test_activations_are_freed_by_the_action_that_ends_their_life(kind):
    """Not only counted: what autograd saved is gone after the backward, or the weight gradient where that is split."""
    boxes, left = {}, []

    def wrap(executor):
        for number, chunk in executor.chunks.items():
            chunk._weighed = chunk._compute  # it has hooks of its own

            def forward(m, x, run=chunk.forward, number=number):
                kept = boxes[number, m] = []

                def pack(tensor):
                    box = Box(tensor.detach())  # an output would keep its node alive, and the node the box
                    kept.append(weakref.ref(box))
                    return box

                with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
                    return run(m, x)

            def last(m, *given, run=chunk.backward if kind == "1f1b" else chunk.backward_weight, number=number):
                assert all(ref() is not None for ref in boxes[number, m])
                result = run(m, *given)
                left.append(sum(ref() is not None for ref in boxes[number, m]))
                return result

            chunk.forward = forward
            setattr(chunk, "backward" if kind == "1f1b" else "backward_weight", last)

    run_threads(case("gpt", order(kind, 2, 2)), wrap)
    assert boxes
    assert all(len(kept) > 3 for kept in boxes.values())
    assert left == [0] * len(boxes)


# --- mutants: each is one mistake that an executor could make; the reference must notice ---


def wrong_scale(executor):
    for chunk in executor.chunks.values():
        begin = chunk.begin
        chunk.begin = lambda batch, begin=begin: begin(replace(batch, num_targets=batch.num_targets + 1))


def swapped_microbatches(executor):
    if executor.rank == 0:
        send = executor._transport.send
        executor._transport.send = lambda m, to, tensor: send(m._replace(microbatch=m.microbatch ^ 1), to, tensor)


def stale_activation(executor):
    wait, first = executor._transport.wait, {}

    def stale(message):
        arrived = wait(message)
        return first.setdefault(message.kind, arrived).detach().clone() if message.kind == Kind.RECV_F else arrived

    executor._transport.wait = stale


def dropped_gradient(executor):
    for chunk in executor.chunks.values():
        if chunk.stage.is_first:
            backward = chunk.backward
            chunk.backward = lambda m, g, backward=backward: backward(m, torch.zeros_like(g) if m == 0 else g)


@pytest.mark.parametrize("mutant", [wrong_scale, swapped_microbatches, stale_activation, dropped_gradient])
def test_mutants_are_caught(mutant):
    c = case("gpt", order("wave", 2, 4))
    c = replace(c, batch=batch_of([1, 1, 1, 1]))  # equal sizes: a swap must not be caught by its shape
    with pytest.raises(AssertionError, match=r"loss of|gradient of"):
        assert_equal(run_threads(c, mutant), reference(c))


def test_a_dropped_send_is_rejected_before_anything_runs():
    complete = add_communication(order("wave", 2, 4))
    rows = [list(row) for row in complete.ranks]
    rows[0].remove(next(action for action in rows[0] if action.kind in SENDS))
    with pytest.raises(Exception, match="SEND"):
        verify(Actions(tuple(map(tuple, rows))))


def test_order_with_split_and_whole_backwards():
    """Legal, and nobody's schedule: stage 0 of one microbatch is split, the other not."""
    rows = (
        (
            Action(0, Kind.F, 0),
            Action(1, Kind.F, 0),
            Action(1, Kind.I, 0),
            Action(0, Kind.I, 0),
            Action(0, Kind.W, 0),
            Action(1, Kind.W, 0),
        ),
    )
    c = case("llama", Actions(rows))
    assert_equal(run_threads(c), reference(c))


def test_compute_kinds_are_all_covered():
    assert {a.kind for kind in KINDS for _, a in order(kind, 2, 4).compute()} == set(COMPUTE)
