"""`VirtualCluster`: hosts on this machine. Each is a network namespace whose one interface sends and receives at a
rate that it can't exceed, if wanted with a delay. Needs root, `ip` and `tc`.

A host is joined to a bridge by a cable: a pair of virtual interfaces or, where there is a delay (this kernel may have
no netem), two taps between which a process carries frames. A token bucket at both ends of it makes a full-duplex NIC.
The bridge and whoever starts the ranks are in a namespace of their own, the hub: nothing is added to the machine's
network, so addresses can't clash with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from wavetrain.base.errors import RunError
from wavetrain.runtime.chunk import sharpen_timer
from wavetrain.runtime.launch import Outcome, Work, run_local

MOST_HOSTS = 200  # addresses are 192.0.2.2 and on
FRAME_S = 260e-6  # of the rate: the longest frame, so that a short message is no quicker than it should be
LEAST_FRAME, MOST_FRAME = 4096, 65536
BURST_S, BURST_FRAMES = 300e-6, 1.25  # what a bucket lets through at once; timers are late by some of it
QUEUE_S = 0.2  # that frames wait in front of it before they are dropped
CALL_S = 20.0  # that `ip` or `tc` may take
READ_BYTES = 65536 + 64
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# <linux/if_tun.h>; frames come with a header that lets them be longer than a packet, as veth has them
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02  # checksums, and TCP over IPv4 in long frames
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_LIBC = ctypes.CDLL(None, use_errno=True)
_NUMBERS = itertools.count()
_OURS = re.compile(r"wt(\d+)n\d+h(?:ub|\d+)")  # of a process


@dataclass(frozen=True)
class Host:
    """One namespace with one interface, which has the same name in each."""

    name: str
    address: str
    hub: str
    cable: str  # the bridge's end
    interface: str = "eth0"

    def enter(self) -> None:
        """Move this process there (it must have one thread only); gloo uses the interface from then on."""
        enter(self.name)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def cut(self) -> None:
        """Pull the cable."""
        _ip(f"-n {self.hub} link set {self.cable} down")

    def mend(self) -> None:
        _ip(f"-n {self.hub} link set {self.cable} up")

    def mislay(self, other: Host) -> None:
        """Send to nowhere what is for another host; what comes from it still arrives."""
        nobody = "02:00:00:00:00:99"
        _ip(f"-n {self.name} neigh replace {other.address} lladdr {nobody} nud permanent dev {self.interface}")


@dataclass(frozen=True)
class Network:
    """`address` is the hub's, where the bridge is and whoever starts the ranks."""

    hub: str
    address: str
    hosts: tuple[Host, ...]

    def prepare(self, rank: int) -> None:
        """For `run_local`: rank r lives on host r, in turns where there are fewer hosts."""
        self.hosts[rank % len(self.hosts)].enter()

    def run(self, act: Callable[[], int]) -> int:
        """The exit code of a forked process that does something at the hub."""
        pid = _fork()
        if pid == 0:
            code = 99
            try:
                _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
                enter(self.hub)
                code = act()
            finally:
                os._exit(code)
        try:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except BaseException:
            os.kill(pid, signal.SIGKILL)  # its ranks die with it
            os.waitpid(pid, 0)
            raise


@dataclass(frozen=True)
class VirtualCluster:
    """Hosts that ranks can be started on."""

    network: Network
    rate_bytes_per_s: float | None  # of each host, either way; None: as fast as this machine is
    delay_s: float  # from host to host, one way

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.network.hosts

    def run(self, work: Work, ranks: int, *, pin: bool = False, in_turns: bool = False, **more: Any) -> Outcome:
        """As `run_local`, which knows `more`, on these hosts in blocks: the first ranks on the first host, and so on.

        `in_turns` deals ranks out one by one instead. `pin` gives each rank one of this process's cores, in turns.
        """
        if ranks % len(self.hosts):
            raise RunError(f"{ranks} ranks can't be laid out evenly over {len(self.hosts)} virtual hosts")
        each, cores = ranks // len(self.hosts), sorted(os.sched_getaffinity(0))

        def prepare(rank: int) -> None:
            self.hosts[rank % len(self.hosts) if in_turns else rank // each].enter()
            if pin:
                os.sched_setaffinity(0, {cores[rank % len(cores)]})

        with at(self.network.hub):
            return run_local(work, ranks, host=self.network.address, prepare=prepare, **more)


def why_not(*, delay: bool = False) -> str:
    """What this machine lacks to have virtual hosts, in words; nothing where it has all."""
    if os.geteuid() != 0:
        return "virtual hosts need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"virtual hosts need {' and '.join(missing)} (iproute2)"
    return "virtual hosts with a delay need /dev/net/tun" if delay and not Path("/dev/net/tun").exists() else ""


@contextlib.contextmanager
def virtual_cluster(
    hosts: int, *, rate_bytes_per_s: float | None = None, delay_s: float = 0.0
) -> Iterator[VirtualCluster]:
    """Hosts with a NIC of a rate each, and a delay from one to another; all is removed at the end, whatever ends it."""
    with network(hosts, delay_s=delay_s) as made:
        if rate_bytes_per_s is not None:
            for host in made.hosts:
                limit(host.name, host.interface, rate_bytes_per_s)
                limit(host.hub, host.cable, rate_bytes_per_s)
        yield VirtualCluster(made, rate_bytes_per_s, delay_s)


@contextlib.contextmanager
def network(num_hosts: int, *, delay_s: float = 0.0) -> Iterator[Network]:
    """Hosts on one bridge, all removed at the end; the namespaces' names have this process's number."""
    reason = why_not(delay=delay_s > 0)
    if reason:
        raise RunError(reason)
    if not 1 <= num_hosts <= MOST_HOSTS:
        raise RunError(f"{num_hosts} virtual hosts: must be from 1 to {MOST_HOSTS}")
    name = f"wt{os.getpid()}n{next(_NUMBERS)}"
    hub = f"{name}hub"
    hosts = tuple(Host(f"{name}h{i}", f"192.0.2.{i + 2}", hub, f"cable{i}") for i in range(num_hosts))
    with _until_signalled(), contextlib.ExitStack() as stack:
        _sweep()
        for one in (hub, *(host.name for host in hosts)):
            stack.callback(_remove, one)
            _ip(f"netns add {one}")
            _ip(f"-n {one} link set lo up")
        _ip(f"-n {hub} link add bridge0 type bridge")
        _ip(f"-n {hub} addr add 192.0.2.1/24 dev bridge0")
        _ip(f"-n {hub} link set bridge0 up")
        if delay_s > 0:
            stack.enter_context(_carried(hosts, delay_s / 2))  # two cables lie between two hosts
        for host in hosts:
            if delay_s == 0:
                _ip(f"-n {hub} link add {host.cable} type veth peer name {host.interface} netns {host.name}")
            _ip(f"-n {hub} link set {host.cable} master bridge0 up")
            _ip(f"-n {host.name} addr add {host.address}/24 dev {host.interface}")
            _ip(f"-n {host.name} link set {host.interface} up")
        yield Network(hub, "192.0.2.1", hosts)


def limit(namespace: str, interface: str, bytes_per_s: float) -> None:
    """Let an interface send so much and no more; what does not fit waits."""
    frame = min(max(LEAST_FRAME, round(bytes_per_s * FRAME_S)), MOST_FRAME)
    burst = round(max(BURST_FRAMES * frame, bytes_per_s * BURST_S))
    queue = max(64 * frame, round(bytes_per_s * QUEUE_S))
    _ip(f"-n {namespace} link set {interface} gso_max_size {frame}")
    shape = f"root tbf rate {round(bytes_per_s * 8)}bit burst {burst} limit {queue}"
    _call("tc", f"-n {namespace} qdisc replace dev {interface} {shape}")


def enter(name: str) -> None:
    """Move this thread into a namespace, and what it starts from then on."""
    with Path(f"/run/netns/{name}").open() as file:
        _set_namespace(file.fileno(), name)


@contextlib.contextmanager
def at(name: str) -> Iterator[None]:
    """This thread in a namespace, for a while."""
    with Path("/proc/thread-self/ns/net").open() as before:
        enter(name)
        try:
            yield
        finally:
            _set_namespace(before.fileno(), "where it was")


def _set_namespace(number: int, name: str) -> None:
    if _LIBC.setns(number, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {name}")


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of any thread; those of BLAS are idle and not used there.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# --- coming and going ---


@contextlib.contextmanager
def _until_signalled() -> Iterator[None]:
    """Signals that would end this process at once raise SystemExit meanwhile, so that nothing stays behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _ENDING}
    try:
        yield
    finally:
        if os.getpid() == owner:
            for number, handler in before.items():
                signal.signal(number, handler)


def _remove(name: str) -> None:
    for number in _ENDING if threading.current_thread() is threading.main_thread() else ():
        signal.signal(number, signal.SIG_IGN)  # it is being done
    with contextlib.suppress(RunError):  # the others are still to go
        _ip(f"netns del {name}")


def _sweep() -> None:
    """Remove what processes left that were killed; others may be doing the same."""
    for path in Path("/run/netns").glob("wt*n*"):
        match = _OURS.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            with contextlib.suppress(RunError):
                _ip(f"netns del {path.name}")


def _ip(words: str) -> None:
    _call("ip", words)


def _call(program: str, words: str) -> None:
    try:
        subprocess.run([program, *words.split()], check=True, capture_output=True, text=True, timeout=CALL_S)
    except subprocess.TimeoutExpired:
        raise RunError(f"virtual hosts: {program} {words}: no end after {CALL_S:g} s") from None
    except subprocess.CalledProcessError as error:
        reason = str(error.stderr).strip() or f"exit code {error.returncode}"
        raise RunError(f"virtual hosts: {program} {words}: {reason}") from None


# --- delay ---


@contextlib.contextmanager
def _carried(hosts: Sequence[Host], delay_s: float) -> Iterator[None]:
    """A tap at both ends of every host's cable, and a process that carries frames from one to the other."""
    with contextlib.ExitStack() as here:  # the carrier keeps them open, this process does not

        def tap(namespace: str, name: str) -> int:
            number = _tap(namespace, name)
            here.callback(os.close, number)
            return number

        ends = [(tap(host.name, host.interface), tap(host.hub, host.cable)) for host in hosts]
        parent = os.getpid()
        pid = _fork()
        if pid == 0:
            _carry(parent, ends, delay_s)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _tap(namespace: str, name: str) -> int:
    """The file of a new tap; a device that is there may still be forbidden, as in some containers."""
    try:
        with at(namespace), contextlib.ExitStack() as undo:
            number = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, number)
            flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(number, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
            fcntl.ioctl(number, _TUNSETVNETHDRSZ, struct.pack("i", 10))
            fcntl.ioctl(number, _TUNSETOFFLOAD, _OFFLOADS)
            undo.pop_all()
    except OSError as error:
        raise RunError(f"virtual hosts: a tap in {namespace}: {error.strerror or error}") from None
    return number


@dataclass
class _Way:
    """One direction of a cable: frames that are on their way, and when they are due."""

    source: int
    target: int
    frames: deque[tuple[float, bytes]]

    def take(self, due_s: float) -> None:
        """All that is there."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.frames.append((due_s, os.read(self.source, READ_BYTES)))

    def give(self, now_s: float) -> None:
        """All that is due; an interface that is down takes none, as a cable that is cut."""
        while self.frames and self.frames[0][0] <= now_s:
            with contextlib.suppress(OSError):
                os.write(self.target, self.frames.popleft()[1])


def _carry(parent: int, ends: Sequence[tuple[int, int]], delay_s: float) -> NoReturn:
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        for number in (*_ENDING, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it ends with its parent
        sharpen_timer()
        with contextlib.suppress(OSError):
            os.nice(-10)  # a switch does not wait for those that use it
        ways = [way for a, b in ends for way in (_Way(a, b, deque()), _Way(b, a, deque()))]
        by_source = {way.source: way for way in ways}
        while os.getppid() == parent:
            first_s = min((way.frames[0][0] for way in ways if way.frames), default=time.monotonic() + 1.0)
            ready, _, _ = select.select(by_source, (), (), max(0.0, first_s - time.monotonic()))
            now_s = time.monotonic()
            for source in ready:
                by_source[source].take(now_s + delay_s)
            for way in ways:
                way.give(time.monotonic())
    finally:
        os._exit(0)
