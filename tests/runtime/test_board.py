from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from wavetrain.runtime.board import BEAT_S, PAGE_BYTES, Board, Heart, SharedProgress, process_state
from wavetrain.runtime.progress import Phase, Progress
from wavetrain.runtime.report import Status
from wavetrain.runtime.world import Place, connect, serve


@pytest.fixture
def place() -> Iterator[Place]:
    """Where a store runs for the length of a test."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = Place(rank=0, size=3, local_rank=0, host="127.0.0.1", port=listener.getsockname()[1])
        store = serve(place, listener)
        yield place
        del store


def until(board: Board, holds: Callable[[list[Status]], bool], seconds: float = 10.0) -> list[Status]:
    end = time.monotonic() + seconds
    while not holds(statuses := board.read()):
        assert time.monotonic() < end, statuses
        time.sleep(0.02)
    return statuses


def test_ranks_that_never_spoke_do_not_block(place: Place) -> None:
    board = Board(connect(place), 3)
    begun = time.monotonic()
    statuses = board.read(pids={1: os.getpid()}, exits={2: -9})
    assert time.monotonic() - begun < 5.0
    assert [s.progress for s in statuses] == [None] * 3
    assert [s.state for s in statuses] == ["", process_state(os.getpid()), ""]
    assert statuses[2].is_over
    assert not statuses[0].is_over


def test_beats_go_on_and_changes_are_noticed(place: Place) -> None:
    board, progress = Board(connect(place), 3), Progress(rank=1)
    heart = Heart(progress, connect(place))
    heart.start()
    try:
        assert board.read()[1].phase is Phase.STARTING
        progress.step = 4
        progress.computing(7, "2F0")
        progress.waiting("2RECV_F0", 0)
        status = until(board, lambda all_: all_[1].phase is Phase.WAITING)[1]
        assert status.progress is not None
        assert (status.progress.step, status.progress.position, status.progress.action) == (4, 7, "2F0")
        assert (status.progress.message, status.progress.source) == ("2RECV_F0", 0)
        assert (status.pid, status.host) == (os.getpid(), socket.gethostname())
        time.sleep(3 * BEAT_S)
        status = board.read()[1]
        assert status.unchanged_s >= 3 * BEAT_S  # by the reader's clock
        assert status.silent_s < status.unchanged_s
        assert status.state in "RSD"
    finally:
        heart.stop()


def test_silence_grows_when_the_heart_stops(place: Place) -> None:
    board = Board(connect(place), 1)
    heart = Heart(Progress(rank=0), connect(place))
    heart.start()
    heart.stop()
    board.read()
    time.sleep(1.0)
    assert board.read()[0].silent_s >= 1.0


def test_failures_are_delivered_at_once_and_in_order(place: Place) -> None:
    board = Board(connect(place), 3)
    hearts = {rank: Heart(Progress(rank=rank), connect(place)) for rank in (2, 0)}
    for heart in hearts.values():
        try:
            try:
                raise ConnectionResetError("by peer")
            except ConnectionResetError:
                raise ValueError("bad input") from None
        except ValueError as error:
            heart.failed(error, "trace")
    statuses = board.read()
    assert [s.order for s in statuses] == [2, 0, 1]
    assert (statuses[2].error, statuses[2].trace) == ("ValueError: bad input", "trace")


def test_an_error_names_what_it_came_from(place: Place) -> None:
    heart = Heart(Progress(rank=0), connect(place))
    try:
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as first:
            raise ValueError("no input") from first
    except ValueError as error:
        heart.failed(error)
    status = Board(connect(place), 1).read()[0]
    assert status.error == "ValueError: no input <- RuntimeError: Connection closed by peer"
    assert status.lost_connection


def test_a_store_that_is_gone_is_no_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = Place(rank=0, size=1, local_rank=0, host="127.0.0.1", port=listener.getsockname()[1])
        store = serve(place, listener)
        heart = Heart(Progress(rank=0), connect(place))
        heart.publish(surely=True)
        del store
    heart.publish(surely=True)
    heart.done()
    assert heart.progress.phase is Phase.DONE


def test_the_extra_duty_runs_with_each_beat(place: Place) -> None:
    called = threading.Event()
    heart = Heart(Progress(rank=0), connect(place), also=called.set)
    heart.start()
    assert called.wait(10.0)
    heart.stop()


def test_the_last_action_outlives_a_rank(place: Place) -> None:
    with mmap.mmap(-1, PAGE_BYTES) as page:
        assert SharedProgress.last(0, page) is None
        progress = SharedProgress(rank=0, page=page)
        board = Board(connect(place), 1, pages={0: page})
        Heart(progress, connect(place)).publish()
        progress.step = 2
        progress.computing(3, "0F1")
        progress.waiting("0RECV_B1", 1)
        progress.computing(4, "0B1")  # shorter than what stood there
        last = board.read()[0].progress
        assert last is not None
        assert (last.step, last.position, last.action, last.message, last.source) == (2, 4, "0B1", "", -1)
        assert last.phase is Phase.COMPUTING
        page[:4] = b"\tx\n\n"  # killed in the middle of a write
        last = board.read()[0].progress
        assert last is not None
        assert last.phase is Phase.STARTING


def test_state_of_processes() -> None:
    assert process_state(os.getpid()) == "R"
    assert process_state(2**22 + 1) == "X"
