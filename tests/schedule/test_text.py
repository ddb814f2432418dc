"""Text both ways, and PyTorch's parser and schedules on the other side."""

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.base.errors import InputError
from wavetrain.schedule import (
    SCHEDULES,
    Action,
    Actions,
    Kind,
    ScheduleError,
    Shape,
    add_communication,
    add_reduction,
    add_sharding,
    parse_text,
    verify,
    write_text,
)
from wavetrain.schedule.action import WITHOUT_MICROBATCH

actions = st.builds(
    lambda stage, kind, m: Action(stage, kind, None if kind in WITHOUT_MICROBATCH else m),
    *(st.integers(0, 10**6), st.sampled_from(Kind), st.integers(0, 10**6)),
)
schedules = st.lists(st.lists(actions, min_size=1).map(tuple), min_size=1).map(lambda rows: Actions(tuple(rows)))


@given(schedules)
def test_what_is_written_is_read_back_equal(schedule):
    assert parse_text(write_text(schedule), file="s.csv") == schedule


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0X1\n", "s.csv:1  action 2: 0X1"),
        ("0F0\n1F\n", "F needs a microbatch"),
        ("1UNSHARD3\n", "UNSHARD takes no microbatch"),
        ("", "has no actions"),
        (",,\n,\n", "has no actions"),
        ("99999999999F0\n", "is no action"),
        ("0F0;0F1\n", "is no action"),
        ("(0F0;zz)OVERLAP_F_B\n", "zz"),
    ],
)
def test_other_text_is_refused(text, says):
    with pytest.raises(InputError) as caught:
        parse_text(text, file="s.csv")
    assert says in str(caught.value)


def test_idle_slots_and_overlaps_of_pytorch_are_read():
    read = parse_text("0F0,,(0F1;0B0)OVERLAP_F_B,0B1\n", file="s.csv")
    assert list(map(str, read.ranks[0])) == ["0F0", "0F1", "0B0", "0B1"]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_pytorch_reads_our_files(name, tmp_path):
    from torch.distributed.pipelining.schedules import _Action

    schedule = SCHEDULES[name]
    order = schedule.order(Shape(4, 6, chunks=2, waves=2))
    complete = add_sharding(add_reduction(add_communication(order)))
    path = tmp_path / "s.csv"
    path.write_text(write_text(complete))
    with path.open(newline="") as stream:
        theirs = [[_Action.from_str(cell) for cell in row] for row in csv.reader(stream)]
    assert [[str(action) for action in row] for row in theirs] == [[str(a) for a in row] for row in complete.ranks]


def dumped(name, ranks, microbatches, stages_per_rank=None, **options):
    """A schedule of PyTorch's own, as its files have it."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(name, ranks, microbatches, stages_per_rank, **options)
    return "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows) + "\n"


CASES = [
    *(("Interleaved1F1B", 4, 8, v) for v in (2, 3)),
    *(("InterleavedZeroBubble", 4, 8, v) for v in (2, 3)),
    *(("LoopedBFS", 4, 8, v) for v in (2, 3)),
    ("ZBVZeroBubble", 4, 8, 2),
    ("DualPipeV", 4, 8, 2),
    ("GPipe", 4, 8, None),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "stages"), CASES)
def test_pytorchs_own_schedules_pass(name, ranks, microbatches, stages):
    proof = verify(parse_text(dumped(name, ranks, microbatches, stages), file=name), microbatches=microbatches)
    assert proof.num_compute >= 2 * ranks * microbatches


V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the drawing tool lowers them as if they were loops
LOOPS = [case for case in CASES if case[0] not in ("GPipe", *V_SHAPED)]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "stages"), LOOPS)
def test_pytorchs_own_lowering_passes_too(name, ranks, microbatches, stages):
    """Sends, receives, gathers and reductions as PyTorch places them."""
    lowered = parse_text(dumped(name, ranks, microbatches, stages, with_comms=True), file=name)
    assert verify(lowered, microbatches=microbatches).num_messages > 0


def test_pytorchs_1f1b_is_right_but_for_its_last_rank():
    """Its drawing counts the last rank's forwards from 1 (hanayo-and-pipelines 3.1); the rest is 1F1B and passes."""
    text = dumped("1F1B", 4, 8)
    with pytest.raises(ScheduleError, match="3F0 is missing"):
        verify(parse_text(text, file="1F1B"))
    rows = text.splitlines()
    for m in range(1, 9):
        rows[3] = rows[3].replace(f"3F{m},", f"3F{m - 1},")
    verify(parse_text("\n".join(rows), file="1F1B"), microbatches=8)


def test_the_out_of_order_example_is_valid():
    """hanayo-and-pipelines, appendix B: PyTorch accepts it and computes wrong gradients; the order itself is right."""
    text = "0F1,0F0,2F1,2F0,2B1,2B0,0B1,0B0\n1F1,1F0,3F1,3F0,3B1,3B0,1B1,1B0\n"
    assert verify(parse_text(text, file="b.csv")).num_compute == 16
