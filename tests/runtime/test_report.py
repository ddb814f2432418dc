from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.runtime.progress import Phase, Progress
from wavetrain.runtime.report import Cause, Limits, Status, diagnose, trouble
from wavetrain.schedule.action import Action, Actions

LIMITS = Limits(floor_s=4.0)
LOST = "RuntimeError: [/x/gloo/tcp/pair.cc:555] Connection closed by peer [127.0.0.1]:42. This is typically caused by"


def waiting(rank: int, source: int, *, age_s: float = 5.0, error: str = "", **facts: Any) -> Status:
    progress = Progress(rank=rank, step=3, action=f"{rank}F1")
    progress.waiting(f"{rank}RECV_F1", source)
    if error:
        progress.failed(error)
    return Status(rank=rank, progress=progress, **{"unchanged_s": age_s, "state": "S"} | facts)


def computing(rank: int, *, age_s: float = 5.0, error: str = "", **facts: Any) -> Status:
    progress = Progress(rank=rank, step=3)
    progress.computing(4, f"{rank}F1")
    if error:
        progress.failed(error)
    return Status(rank=rank, progress=progress, **{"unchanged_s": age_s, "state": "R"} | facts)


def in_phase(rank: int, phase: Phase, **facts: Any) -> Status:
    return Status(rank=rank, progress=Progress(rank=rank, phase=phase), **{"unchanged_s": 5.0} | facts)


def line(culprit: Status) -> list[Status]:
    """Four ranks: 3 waits for 2, 2 for 1, 1 is the culprit, 0 waits for it too."""
    return [waiting(0, 1), culprit, waiting(2, 1), waiting(3, 2)]


@pytest.mark.parametrize(
    ("culprit", "cause", "words"),
    [
        (computing(1, exit_code=-9), Cause.KILLED, "rank 1 was killed by signal 9 (SIGKILL), in step 3 at 1F1"),
        (computing(1, error="ValueError: bad", exit_code=4), Cause.EXCEPTION, "raised an exception: ValueError: bad"),
        (computing(1, exit_code=0), Cause.EXITED, "exited before its work was done: exit code 0"),
        (computing(1, state="X"), Cause.EXITED, "its process is gone"),
        (computing(1, state="T", pid=77), Cause.STOPPED, "stopped (SIGSTOP or a debugger; process 77)"),
        (computing(1, silent_s=4.0), Cause.SILENT, "no heartbeat for 4.0 s; its process lives, so its network is cut"),
        (computing(1, silent_s=4.0, state=""), Cause.SILENT, "its network is cut, or its process is stopped or gone"),
        (computing(1), Cause.COMPUTING, "computing for 5.0 s"),
        (in_phase(1, Phase.STARTING, unchanged_s=500.0), Cause.STARTING, "starting for 500.0 s"),
        (Status(rank=1, unchanged_s=500.0, silent_s=500.0, state="R"), Cause.STARTING, "before it said anything"),
        (in_phase(1, Phase.DONE), Cause.LEFT, "done while other ranks still needed it"),
    ],
)
def test_the_culprit_is_named_with_the_chain(culprit: Status, cause: Cause, words: str) -> None:
    statuses = line(culprit)
    assert trouble(statuses, LIMITS)
    report = diagnose(statuses, LIMITS)
    assert (report.culprit, report.cause, report.chain) == (1, cause, (1, 2, 3))
    assert words in report.text.splitlines()[0]
    assert "rank 3 waits for 3RECV_F1 from rank 2, which waits for 2RECV_F1 from rank 1, which " in report.text
    assert len(report.text.splitlines()) <= 10


def test_document() -> None:
    document = json.loads(json.dumps(diagnose(line(computing(1, exit_code=-9)), LIMITS).document(), allow_nan=False))
    assert list(document)[:2] == ["schema", "culprit"]
    assert (document["schema"], document["culprit"], document["cause"]) == ("wavetrain.hang/1", 1, "killed")
    assert [entry["rank"] for entry in document["ranks"]] == [1, 2, 3, 0]
    entry = document["ranks"][1]
    assert (entry["waits_for"], entry["from_rank"], entry["unchanged_s"]) == ("2RECV_F1", 1, 5.0)


def test_survivors_that_lost_a_connection_are_not_blamed() -> None:
    statuses = [
        waiting(0, 1, error=LOST, exit_code=4, order=1),
        computing(1, exit_code=-9),
        waiting(2, 1, error=LOST, exit_code=4, order=2),
        waiting(3, 2, error=LOST, exit_code=4, order=3),
    ]
    report = diagnose(statuses, LIMITS)
    assert (report.culprit, report.cause, report.chain) == (1, Cause.KILLED, (1, 2, 3))
    assert "pair.cc" not in report.text
    statuses[1] = computing(1, error="ZeroDivisionError: x", exit_code=4, order=4)
    assert diagnose(statuses, LIMITS).culprit == 1
    statuses[1] = computing(1, state="T")
    assert diagnose(statuses, LIMITS).cause is Cause.STOPPED


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [x.cc:1] Connection closed by peer [::1]:5",
        "RuntimeError: [x.cc:1] Read error [127.0.0.1]:5: Connection reset by peer",
        "RuntimeError: [x.cc:1] Timed out waiting 1000ms for recv operation to complete",
        "RuntimeError: writev [127.0.0.1]:5: Broken pipe",
        "torch.distributed.DistBackendError: Gloo connectFullMesh failed with [x.cc:1] Connection refused",
        "DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
        "DistStoreError: wait timeout after 300ms",
        "StageError: no input <- RuntimeError: Connection closed by peer",
    ],
)
def test_texts_of_a_lost_connection(text: str) -> None:
    assert waiting(0, 1, error=text).lost_connection


def test_nobody_but_a_lost_connection_is_the_link() -> None:
    report = diagnose([waiting(0, 1, error=LOST, order=2), waiting(1, 0, error=LOST, order=1)], LIMITS)
    assert (report.cause, report.culprit, report.peer) == (Cause.LINK, 0, 1)
    assert report.document()["peer"] == 1


def test_a_connection_lost_to_something_else_is_the_ranks_own_error() -> None:
    statuses = [waiting(0, 1, error=LOST, order=2), computing(1, error="OSError: Connection refused", order=1)]
    report = diagnose(statuses, LIMITS)
    assert (report.culprit, report.cause) == (1, Cause.EXCEPTION)


def test_of_two_exceptions_the_first_counts() -> None:
    statuses = [computing(0, error="KeyError: late", order=2), computing(1, error="ValueError: early", order=1)]
    assert diagnose(statuses, LIMITS).culprit == 1


def test_slow_is_not_hung() -> None:
    assert not trouble(line(computing(1, age_s=0.2)), LIMITS)  # it makes progress: rank 3 must wait
    assert not trouble(line(in_phase(1, Phase.STARTING)), LIMITS)  # starting may take longer
    assert not trouble([in_phase(0, Phase.DONE, exit_code=0, unchanged_s=900.0), computing(1, age_s=0.1)], LIMITS)
    assert not trouble(line(computing(1)), Limits(floor_s=1.0, step_s=2.0, factor=3.0))
    assert trouble(line(computing(1)), Limits(floor_s=1.0, step_s=1.0, factor=3.0))
    assert trouble(line(in_phase(1, Phase.STARTING, silent_s=4.5)), LIMITS)  # it may have started since
    assert trouble([waiting(0, 1, age_s=50.0), computing(1, age_s=0.1)], LIMITS)  # but not for ever


def test_a_collective_waits_for_the_rank_that_is_not_there() -> None:
    statuses = [in_phase(r, Phase.COLLECTIVE, state="S") for r in range(3)] + [computing(3, age_s=6.0)]
    report = diagnose(statuses, LIMITS)
    assert (report.culprit, report.cause) == (3, Cause.COMPUTING)
    assert "waits for a collective from rank 3" in report.text
    assert not trouble([*statuses[:3], computing(3, age_s=0.1)], LIMITS)


def test_all_wait_in_a_circle() -> None:
    statuses = [waiting(0, 1), waiting(1, 2), waiting(2, 0, age_s=6.0)]
    assert trouble(statuses, LIMITS)
    report = diagnose(statuses, LIMITS)
    assert (report.cause, report.culprit, report.peer) == (Cause.LINK, 0, 2)
    assert len(report.chain) == 3
    assert "which waits for 0RECV_F1 from rank 1" in report.text


@pytest.mark.parametrize(("position", "words"), [(2, "the link between them lost it"), (1, "has not sent it")])
def test_actions_tell_a_lost_message_from_one_not_sent(position: int, words: str) -> None:
    rows = (("0F1", "0SEND_F1", "0RECV_B1", "0B1"), ("1RECV_F1", "1F1", "1B1", "1SEND_B1"))
    actions = Actions(tuple(tuple(map(Action.parse, row)) for row in rows))
    sender = waiting(0, 1)
    assert sender.progress is not None
    sender.progress.message, sender.progress.position = "0RECV_B1", position
    report = diagnose([sender, waiting(1, 0)], LIMITS, actions)
    assert report.cause is Cause.LINK
    assert words in report.why


def test_many_ranks_are_folded() -> None:
    statuses = [computing(0, exit_code=-9), *(waiting(r, 0) for r in range(1, 64))]
    report = diagnose(statuses, LIMITS)
    assert "and 52 more ranks" in report.text
    assert len(report.document()["ranks"]) == 64


@settings(deadline=None)
@given(st.data())
def test_whoever_waits_for_whom_the_guilty_one_is_found(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 9))
    culprit = data.draw(st.integers(0, size - 1))
    statuses = []
    for rank in range(size):
        source = data.draw(st.integers(0, size - 1).filter(lambda other, rank=rank: other != rank))
        statuses.append(waiting(rank, source, error=data.draw(st.sampled_from(["", LOST])), order=rank))
    fault = data.draw(st.sampled_from([{"exit_code": -9}, {"state": "T"}, {"silent_s": 9.0}, {"exit_code": 0}, {}]))
    statuses[culprit] = computing(culprit, **fault)
    report = diagnose(statuses, LIMITS)
    assert report.culprit == report.chain[0] == culprit
    assert len(set(report.chain)) == len(report.chain)
    assert report.text
