"""The same pipelines over real processes and gloo, matched by tag or by the order of a link; and what messages are."""

import pytest
import torch
from tests.runtime.pipeline import Result, assert_equal, reference, run_rank
from tests.runtime.test_executor import case, order

from wavetrain.base.errors import RunError
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.samehost import open_same_host
from wavetrain.runtime.transport import (
    BACKWARD,
    CARRIED,
    FORWARD,
    Grouped,
    Mailbox,
    Message,
    Post,
    links_of,
    open_links,
    ordered,
    tagged,
)
from wavetrain.runtime.world import gloo_group

PIPELINES = [
    ("1f1b", 3, 4, 1),
    ("interleaved", 2, 3, 1),
    ("wave", 2, 3, 2),
    ("wave", 4, 5, 1),
    ("wave-zb", 2, 4, 2),
    ("chimera", 2, 4, 1),
]


def run_processes(c, transport):
    """Every rank compares its own share with a reference of its own; a difference fails the run."""

    def work(world):
        torch.set_num_threads(1)
        with gloo_group(world, timeout_s=60):
            result = run_rank(c, world.rank, transport(c, world))
        expected = reference(c)
        mine = {stage: expected.gradients[stage] for stage in result.gradients}
        assert_equal(result, Result({m: expected.losses[m] for m in result.losses}, mine))

    run_local(work, c.actions.num_ranks).check()


def by_tag(c, world):
    return Grouped(world.rank, tagged(c.actions.placement.num_stages, 256))


def all_links(c):
    """Shared gradients travel between the ends too, both ways."""
    ends = range(c.actions.num_ranks)
    return {*links_of(c.actions), *((a, b) for a in ends for b in ends if a != b)}


def by_link(c, world):
    return Grouped(world.rank, ordered(open_links(all_links(c))))


def by_memory(c, world):
    return open_same_host(
        world.rank, world.size, world.store, all_links(c), most_bytes=2**14, crowded=world.size > world.place.num_cores
    )


def by_little_memory(c, world):
    """Two slots: senders have to hold back."""
    transport = by_memory(c, world)
    for box in (*transport._inbox.values(), *transport._outbox.values()):
        object.__setattr__(box, "num_slots", 1)
    return transport


@pytest.mark.parametrize("route", [by_tag, by_link, by_memory, by_little_memory])
@pytest.mark.parametrize(("kind", "ranks", "microbatches", "waves"), PIPELINES)
def test_processes_equal_one(kind, ranks, microbatches, waves, route):
    run_processes(case("llama", order(kind, ranks, microbatches, waves=waves), tied=True), route)


def test_tags_are_all_different_and_in_range():
    route = tagged(6, 5)
    tags = [route(Message(kind, stage, m), 0, 1)[1] for kind in CARRIED for stage in range(6) for m in range(5)]
    assert sorted(tags) == list(range(len(tags)))


def test_more_messages_than_tags_are_refused():
    with pytest.raises(RunError, match="more messages than gloo has tags"):
        tagged(10**5, 10**5)


def test_a_message_is_found_by_what_it_is_whatever_came_first():
    post = Post()
    one, other = Mailbox(0, post), Mailbox(1, post)
    messages = [Message(kind, stage, m) for kind in (FORWARD, BACKWARD) for stage in (1, 2) for m in (0, 1)]
    for number, message in enumerate(messages):
        one.send(message, 1, torch.tensor(number))
    for number, message in reversed(list(enumerate(messages))):
        assert other.wait(message).item() == number


def test_equal_messages_of_two_steps_keep_their_order():
    post, message = Post(), Message(FORWARD, 1, 0)
    for number in range(3):
        Mailbox(0, post).send(message, 1, torch.tensor(number))
    assert [Mailbox(1, post).wait(message).item() for _ in range(3)] == [0, 1, 2]
