"""Work that a rank does in a new process."""

import os
import signal
import time

import pytest

from wavetrain.base.errors import RunError
from wavetrain.runtime.board import process_state
from wavetrain.runtime.fork import apart
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.world import World


def raised(own: World) -> None:
    raise ValueError(f"rank {own.rank} can't")


def told(_: World) -> None:
    raise RunError("in words")


def killed(_: World) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (raised, "part 3: ValueError: rank 1 can't"),
        (raised, ", in raised"),
        (lambda _: {1}, "TypeError: Object of type set is not JSON serializable"),
        (told, "part 3: in words"),
        (killed, "part 3: its process ended with signal 9"),
    ],
)
def test_what_goes_wrong_there_is_said_here(work, says: str) -> None:
    """And the rank it happened to is named, while the other one waits for its message."""

    def waits(own: World) -> None:
        if own.rank == 0:
            own.store.get("never")
        return work(own)

    outcome = run_local(lambda world: apart(world, "part 3", waits), 2)
    assert outcome.exit_code == RunError.exit_code
    assert outcome.report.culprit == 1
    assert says in outcome.report.text


def test_what_is_found_there_is_returned_and_nothing_else_is_changed() -> None:
    changed = []

    def work(world: World) -> None:
        found = apart(world, "part", lambda _: changed.append(1) or {"list": [1, 2.5, None], "large": "x" * 2**20})
        assert not changed
        world.give(f"{found['list']} {len(found['large'])}".encode())

    assert run_local(work, 1).check().results == (b"[1, 2.5, None] 1048576",)


def test_it_dies_with_its_rank() -> None:
    def work(world: World) -> None:
        def long(_: World) -> None:
            os.setpgid(0, 0)  # or it would be ended with the rank's group
            world.give(str(os.getpid()).encode())
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)

        apart(world, "part", long)

    pid = int(run_local(work, 1).results[0])
    until = time.monotonic() + 10
    while process_state(pid) not in ("X", "Z") and time.monotonic() < until:
        time.sleep(0.01)
    assert process_state(pid) in ("X", "Z")
