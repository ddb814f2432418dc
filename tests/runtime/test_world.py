import ctypes
import os
import socket
from dataclasses import replace

import pytest

from wavetrain.base.errors import InputError, RunError
from wavetrain.runtime.progress import Progress
from wavetrain.runtime.world import (
    Place,
    World,
    await_store,
    first_host,
    place_from_environment,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "4242",
    "SLURM_NODELIST": "gpu[03-07,9],old1",
}


def test_nothing_set_is_no_place() -> None:
    assert place_from_environment({"PATH": "/bin", "MASTER_ADDR": "left over", "SLURM_JOB_ID": "7"}) is None


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    expected = Place(rank=5, size=8, local_rank=1, host="10.0.0.1", port=29500, attempt=2)
    expected = replace(expected, local_size=4, cores=frozenset({0, 1, 2}))
    assert place_from_environment(TORCHRUN) == expected
    assert place_from_environment(TORCHRUN | SLURM) == expected  # torchrun inside srun: the inner one counts
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    assert place_from_environment(TORCHRUN) == replace(expected, cores=frozenset()), "it was bound to a core of its own"


def test_rank_0_serves_unless_the_agent_does() -> None:
    first = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}
    assert not place_from_environment(first).serves
    assert place_from_environment(first | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).serves


def test_slurm() -> None:
    place = place_from_environment(SLURM)
    assert place == Place(rank=0, size=4, local_rank=0, host="gpu03", port=16384 + 4242, serves=True)
    step = SLURM | {"SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "gpu07", "MASTER_PORT": "1234"}
    place = place_from_environment(step)
    assert (place.host, place.port, place.serves) == ("gpu07", 1234, False)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[03-07,9]", "node03"),
        ("node[9,3-4],x", "node9"),
        ("rack[1-2]-node[08-10].local,y", "rack1-node08.local"),
        ("", None),
        ("node[", None),
        ("node[a-b]", None),
        ("node 1", None),
        ("node[1-2", None),
    ],
)
def test_first_host(nodes: str, first: str | None) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environ", "changed", "named"),
    [
        (TORCHRUN, {"RANK": None}, "RANK"),
        (TORCHRUN, {"WORLD_SIZE": None, "MASTER_PORT": ""}, "WORLD_SIZE MASTER_PORT"),
        (TORCHRUN, {"LOCAL_RANK": None}, "LOCAL_RANK"),
        (TORCHRUN, {"RANK": "8"}, "RANK WORLD_SIZE"),
        (TORCHRUN, {"RANK": "-1"}, "RANK"),
        (TORCHRUN, {"RANK": "two"}, "RANK two"),
        (TORCHRUN, {"LOCAL_RANK": "6"}, "LOCAL_RANK RANK"),
        (TORCHRUN, {"MASTER_PORT": "0"}, "MASTER_PORT 65535"),
        (TORCHRUN, {"MASTER_PORT": "70000"}, "MASTER_PORT 65535"),
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT"),
        (SLURM, {"SLURM_NTASKS": None}, "SLURM_NTASKS"),
        (SLURM, {"SLURM_PROCID": "4"}, "SLURM_PROCID SLURM_NTASKS"),
        (SLURM, {"SLURM_NODELIST": None}, "SLURM_STEP_NODELIST"),
        (SLURM, {"SLURM_NODELIST": "node["}, "SLURM_NODELIST node["),
        (SLURM, {"SLURM_JOB_ID": None}, "SLURM_JOB_ID"),
    ],
)
def test_incomplete_or_contradictory(environ: dict[str, str], changed: dict[str, str | None], named: str) -> None:
    merged = {name: value for name, value in (environ | changed).items() if value is not None}
    with pytest.raises(InputError) as caught:
        place_from_environment(merged)
    for word in named.split():
        assert word in str(caught.value)


def test_bytes_given_are_kept_in_order() -> None:
    place = Place(rank=0, size=1, local_rank=0, host="127.0.0.1", port=1)
    world = World(place=place, store=None, progress=Progress(rank=0), given=bytearray())  # type: ignore[arg-type]
    world.give(b"one ")
    world.give(b"two")
    assert bytes(world.given) == b"one two"
    assert (world.rank, world.size, world.local_rank) == (0, 1, 0)


def test_a_store_that_does_not_come_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        place = Place(rank=3, size=4, local_rank=0, host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(RunError, match=r"rank 3: no store at 127.0.0.1:\d+ .*refused"):
            await_store(place, timeout_s=0.1)


def _servers_now(servers: ctypes.c_int) -> int:
    return servers.value
