"""Who holds a run up is named, and nobody else: of drawn times, of simulated steps, and of real ranks made slow."""

import io
import json
import logging
import random
import subprocess
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.runtime.namespaces import needs_namespaces
from tests.runtime.plans import small_plan

from wavetrain.base.errors import InputError
from wavetrain.commands.train_run import _planned_busy, job_of
from wavetrain.runtime.chunk import Durations
from wavetrain.runtime.executor import Moment
from wavetrain.runtime.inject import parse_fault
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.stragglers import (
    LEAST_STEPS,
    Against,
    Mark,
    Told,
    as_document,
    busy_of,
    marks_of,
    message_seconds,
    slow_links,
    slow_ranks,
)
from wavetrain.runtime.trainer import train
from wavetrain.runtime.virtual import network
from wavetrain.schedule.action import SENDS, Kind
from wavetrain.show.train import card

RANKS = 4
seeds = st.integers(0, 2**32)


# --- ranks, of drawn times ---


def drawn(seed, *, ranks, steps=20, slow=None, since=0, noise=0.1, scale=1.0):
    """Times with 10 % of noise around a plan whose stages differ; the machine is faster or slower than planned."""
    chance = random.Random(seed)
    planned = [chance.uniform(0.1, 1.0) for _ in range(ranks)]
    factor = slow or {}
    rows = [
        [
            one * scale * chance.uniform(1 - noise, 1 + noise) * (factor.get(rank, 1.0) if step >= since else 1.0)
            for step in range(steps)
        ]
        for rank, one in enumerate(planned)
    ]
    return [
        Told(rank=rank, busy_s=tuple(row), planned_s=one, first_s=min(row[:5]))
        for rank, (one, row) in enumerate(zip(planned, rows, strict=True))
    ]


def named(told, *, is_own_device=True):
    return [found.rank for found in slow_ranks(told, is_own_device=is_own_device)]


many, scales = st.integers(3, 12), st.floats(0.05, 20.0)


@given(seeds, many, scales, st.floats(1.6, 5.0), st.data())
def test_a_slow_rank_is_named_and_only_it(seed, ranks, scale, factor, data):
    culprit = data.draw(st.integers(0, ranks - 1))
    told = drawn(seed, ranks=ranks, slow={culprit: factor}, scale=scale)
    (found,) = slow_ranks(told, is_own_device=True)
    assert found.rank == culprit
    assert found.slower_than_median == pytest.approx(factor, rel=0.25)
    assert found.against is Against.PLAN
    shuffled = random.Random(seed).sample(told, ranks)
    assert slow_ranks(shuffled, is_own_device=True) == [found]


@given(seeds, many, scales, st.booleans())
def test_noise_and_a_slow_machine_name_nobody(seed, ranks, scale, is_own_device):
    assert named(drawn(seed, ranks=ranks, scale=scale), is_own_device=is_own_device) == []
    together = dict.fromkeys(range(ranks), 3.0)  # all of them, in the midst of the run
    told = drawn(seed, ranks=ranks, slow=together, since=8, scale=scale)
    assert named(told, is_own_device=is_own_device) == []


@given(seeds, many, st.floats(2.0, 100.0), st.data())
def test_some_bad_steps_name_nobody(seed, ranks, factor, data):
    culprit = data.draw(st.integers(0, ranks - 1))
    assert named(drawn(seed, ranks=ranks, slow={culprit: factor}, since=11)) == []  # nine of twenty
    assert named(drawn(seed, ranks=ranks, slow={culprit: factor}, since=10)) == [culprit]


@given(seeds, many, st.floats(1.7, 5.0), st.data())
def test_on_another_device_a_rank_is_compared_with_its_own_beginning(seed, ranks, factor, data):
    """What the plan says of unlike stages is not believed there; that a rank became slow is."""
    culprit, wrong = (data.draw(st.integers(0, ranks - 1)) for _ in range(2))
    told = drawn(seed, ranks=ranks)
    misjudged = [replace(one, planned_s=one.planned_s / (3 if one.rank == wrong else 1)) for one in told]
    assert named(misjudged) == [wrong]
    assert named(misjudged, is_own_device=False) == []
    (found,) = slow_ranks(drawn(seed, ranks=ranks, slow={culprit: factor}, since=6), is_own_device=False)
    assert (found.rank, found.against) == (culprit, Against.FIRST)


@given(seeds, st.integers(3, 8), st.data())
def test_like_ranks_are_compared_on_any_device(seed, alike, data):
    """Replicas: three or more with the same work need no prediction."""
    culprit = data.draw(st.integers(0, alike - 1))
    chance = random.Random(seed)
    told = [
        Told(
            rank=rank,
            busy_s=tuple((2.0 if rank == culprit else 1.0) * chance.uniform(0.9, 1.1) for _ in range(10)),
            planned_s=0.01,
        )
        for rank in range(alike)
    ]
    other = Told(rank=alike, busy_s=(50.0,) * 10, planned_s=0.02)  # nothing is like it: nothing can be said
    (found,) = slow_ranks([*told, other], is_own_device=False)
    assert (found.rank, found.against) == (culprit, Against.LIKE)


def test_of_two_ranks_only_the_plan_can_tell():
    told = [Told(rank=0, busy_s=(1.0,) * 9, planned_s=1.0), Told(rank=1, busy_s=(2.0,) * 9, planned_s=1.0)]
    assert named(told) == [1]
    assert named(told, is_own_device=False) == []
    assert named(told[1:]) == [1]
    assert named([]) == []


def test_a_few_steps_are_not_enough():
    told = [Told(rank=rank, busy_s=(1.0 + 4 * (rank == 1),) * LEAST_STEPS, planned_s=1.0) for rank in range(4)]
    assert named(told) == [1]
    assert named([*told[:3], replace(told[3], busy_s=told[3].busy_s[1:])]) == []


# --- steps, simulated: what ranks record when one of them or a link is slow ---


def simulated(actions, *, busy, delay, skew=lambda _: 0.0):
    """The moments of every rank: actions in their order, each when the rank is free and its message is there."""
    senders = {str(action): rank for rank, row in enumerate(actions.ranks) for action in row if action.kind in SENDS}
    clock, place, sent = dict.fromkeys(range(RANKS), 0.0), dict.fromkeys(range(RANKS), 0), {}
    moments = {rank: [] for rank in range(RANKS)}
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(actions.ranks):
            while place[rank] < len(row):
                action = row[place[rank]]
                stage, kind, microbatch = action
                start = clock[rank]
                if kind in (Kind.F, Kind.B, Kind.I):
                    near, letter = (stage - 1, "F") if kind is Kind.F else (stage + 1, "B")
                    needed = f"{near}SEND_{letter}{microbatch}"
                    if senders.get(needed, rank) != rank:
                        if needed not in sent:
                            break
                        start = max(start, sent[needed] + delay(senders[needed], rank))
                if kind in SENDS:
                    sent[str(action)] = start
                    end, lane = start + 1e-5, "send"
                elif kind in (Kind.RECV_F, Kind.RECV_B):
                    place[rank], progress = place[rank] + 1, True
                    continue
                else:
                    end, lane = start + busy(rank), "compute"
                off = skew(rank)
                moments[rank].append(Moment(str(action), lane, start + off, end + off, 0, 0))
                clock[rank], place[rank], progress = end, place[rank] + 1, True
    assert all(place[rank] == len(row) for rank, row in enumerate(actions.ranks))
    return moments


def verdict(actions, chance, *, slow_rank=None, slow_link=None, skew=None):
    """Ranks and links that are named after some steps."""

    def busy(rank):
        return 0.01 * chance.uniform(0.95, 1.05) * (2.0 if rank == slow_rank else 1.0)

    def delay(source, target):
        return 0.001 * chance.uniform(0.8, 1.2) * (20.0 if (source, target) == slow_link else 1.0)

    skew = skew or [0.0] * RANKS
    steps = [simulated(actions, busy=busy, delay=delay, skew=skew.__getitem__) for _ in range(6)]
    rows = [tuple(busy_of(step[rank]) for step in steps) for rank in range(RANKS)]
    told = [Told(rank=rank, busy_s=row, planned_s=1.0) for rank, row in enumerate(rows)]
    samples = {
        number: message_seconds({rank: marks_of(row) for rank, row in step.items()})
        for number, step in enumerate(steps)
    }
    links = slow_links(samples, dict.fromkeys(range(RANKS), "here"))
    return named(told), [(found.source, found.target) for found in links]


@cache
def actions_of(schedule):
    return job_of(small_plan(pp=RANKS, schedule=schedule, microbatches=8, blocks=8), emulate=True, steps=1).actions


schedules = st.sampled_from(["1f1b", "wave", "zb-h1"])


@given(seeds, schedules, st.integers(0, RANKS - 1))
@settings(max_examples=40)
def test_a_slow_rank_does_not_blame_its_links(seed, schedule, culprit):
    assert verdict(actions_of(schedule), random.Random(seed), slow_rank=culprit) == ([culprit], [])


@given(seeds, schedules, st.integers(0, RANKS - 2), st.booleans())
@settings(max_examples=40)
def test_a_slow_link_is_named_and_its_ends_are_not(seed, schedule, end, ahead):
    link = (end, end + 1) if ahead else (end + 1, end)
    assert verdict(actions_of(schedule), random.Random(seed), slow_link=link) == ([], [link])


@given(seeds, schedules, st.lists(st.floats(-0.005, 0.005), min_size=RANKS, max_size=RANKS))
@settings(max_examples=40)
def test_clocks_that_are_apart_name_nobody(seed, schedule, skew):
    assert verdict(actions_of(schedule), random.Random(seed), skew=skew) == ([], [])


def test_a_message_takes_time_only_while_it_is_waited_for():
    """Both are sent at 0; the first is asked for at 5 and there at 5.5, the second there when it is asked for."""
    sent = [Mark("0SEND_F1", 0.0, 0.0), Mark("0SEND_F2", 0.0, 0.0)]
    assert message_seconds({0: sent, 1: [Mark("1F1", 5.0, 5.5), Mark("1F2", 6.0, 6.0001)]}) == {(0, 1): 0.5}
    assert message_seconds({0: sent[:1], 1: [Mark("1F1", -2.0, 0.25)]}) == {(0, 1): 0.25}


def test_links_within_hosts_are_no_measure_for_those_between():
    near = {(rank, rank + 1): 0.0001 for rank in (0, 1, 2, 4, 5, 6)}
    samples = {step: near | {(3, 4): 0.01} for step in range(5)}
    assert slow_links(samples, {rank: "ab"[rank // 4] for rank in range(8)}) == []
    assert len(slow_links(samples, dict.fromkeys(range(8), "a"))) == 1


def test_the_wait_for_gradients_of_replicas_is_not_work():
    moments = [Moment(f"0B{m}", "compute", m, m + (0.9 if m == 3 else 0.1), 0, 0) for m in range(4)]
    assert busy_of(moments) == pytest.approx(0.4)


# --- real ranks ---


def faults(*texts):
    return tuple(parse_fault(text, where="--inject") for text in texts)


def slow(rank, step):
    return faults(f"slow:{rank}:{step}:forward", f"slow:{rank}:{step}:backward")


def job(*, seconds=None, steps=22, blocks=8, **more):
    """Real, or waiting so many seconds per action of each stage."""
    model = {key: more.pop(key) for key in ("hidden", "seq_len") if key in more}
    plan = small_plan(pp=RANKS, schedule="1f1b", microbatches=8, blocks=blocks, **model)
    made = job_of(plan, emulate=seconds is not None, steps=steps, **more)
    if seconds is None:
        return made
    times = tuple(Durations(s, s, s) for s in seconds)
    return replace(made, emulated=times, planned_busy=_planned_busy(made.actions, times))


def run(made, tmp_path, **options):
    """What was found, and what was said of it while the run went on and at its end."""
    log = tmp_path / "said"
    log.touch()

    def work(world):
        logger = logging.getLogger("wavetrain")
        logger.addHandler(logging.FileHandler(log))
        records = train(made, world)
        if world.rank == 0:
            world.give(json.dumps([records[0].stragglers, [one.busy_s for one in records.values()]]).encode())

    outcome = run_local(work, RANKS, actions=made.actions, **options)
    assert outcome.exit_code == 0
    found, busy_s = json.loads(outcome.results[0])
    return found, busy_s, log.read_text().splitlines()


UNLIKE = (0.001, 0.002, 0.001, 0.003)  # stages that differ, as planned


def test_an_emulated_rank_that_is_slow_is_named(tmp_path):
    found, busy_s, said = run(job(seconds=UNLIKE, faults=slow(2, 3)), tmp_path)
    assert [one["rank"] for one in found["ranks"]] == [2]
    assert found["links"] == []
    assert found["ranks"][0]["ratio"] == pytest.approx(2.0, rel=0.2)
    assert found["ranks"][0]["planned_s"] == pytest.approx(0.024)
    assert busy_s[2] == pytest.approx(found["ranks"][0]["busy_s"])
    first, last = said  # while it ran, and at its end: not with every look
    assert first.startswith("rank 2")
    assert "up to 9)" in first
    assert "up to 21)" in last


def test_emulated_ranks_that_run_as_planned_are_not_named(tmp_path):
    found, busy_s, said = run(job(seconds=UNLIKE), tmp_path)
    assert found == {"ranks": [], "links": []}
    assert said == []
    assert all(s >= 24 * planned for s, planned in zip(busy_s, UNLIKE, strict=True))


def test_a_computing_rank_that_becomes_slow_is_named(tmp_path):
    found, _, said = run(job(faults=slow(1, 7), steps=26), tmp_path)
    worst = max(found["ranks"], key=lambda one: one["slower_than_median"])
    assert (worst["rank"], worst["against"]) == (1, "first steps")
    assert any(line.startswith("rank 1") for line in said)


@needs_namespaces
def test_a_slow_link_of_several_is_named(tmp_path):
    """The last rank sends on one link only, so its host's way out is that link.

    What it acknowledges goes the same way, so the link back may be slow with it, though never slower.
    """
    made = job(seconds=(0.003,) * RANKS, hidden=256, seq_len=256, transport="gloo", steps=14)
    with network(RANKS) as net:
        shaped = f"tc -n {net.hosts[-1].name} qdisc add dev eth0 root tbf rate 100mbit burst 16kb latency 2s"
        subprocess.run(shaped.split(), check=True, capture_output=True, timeout=20)

        def act():
            found, _, _ = run(made, tmp_path, host=net.address, prepare=net.prepare)
            (tmp_path / "found").write_text(json.dumps(found))
            return 0

        assert net.run(act) == 0
    found = json.loads((tmp_path / "found").read_text())
    named = {(one["from"], one["to"]): one for one in found["links"]}
    there, back = (RANKS - 1, RANKS - 2), (RANKS - 2, RANKS - 1)
    assert there in named
    assert set(named) <= {there, back}
    assert max(named, key=lambda link: named[link]["ratio"]) == there
    assert found["ranks"] == []


# --- as users see it ---


def test_only_computing_can_be_slow():
    with pytest.raises(InputError, match="only computing can be slow"):
        parse_fault("slow:1:3:communication", where="--inject")


def shown(document):
    console = Console(file=io.StringIO(), width=120)
    console.print(card(document))
    return console.file.getvalue()


def test_the_card_has_a_line_for_what_was_found():
    told = [Told(rank=rank, busy_s=(1.0 + (rank == 2),) * 9, planned_s=1.0) for rank in range(4)]
    links = slow_links({n: {(0, 1): 0.001, (1, 2): 0.001, (2, 3): 0.01} for n in range(4)}, {})
    found = as_document([*links, *slow_ranks(told, is_own_device=True)])
    step = {"step_s": 1.0, "bubble_fraction": 0.1}
    document = {"emulated": True, "timeline_s": 1.0, "tokens_per_s": 1.0, "losses": [], "steps": 9, "ranks": 4}
    document |= {**step, "predicted": step, "replayed": step, "files": []}
    assert "rank 2, 2.00 times the median; link 2 -> 3, 10.0 times" in shown(document | {"stragglers": found})
    assert "slow" not in shown(document | {"stragglers": as_document([])})
