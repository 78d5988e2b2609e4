"""Isolated machines on one host: Linux namespaces, and a switch that connects them.

A machine has its own network, processes, shared memory and Ray folder, and shares the file system. All of it
ends with the test's process, however that ends.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import select
import struct
import subprocess
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from support.programs import started

_TUNSETIFF = 0x400454CA
_TAP, _NO_HEADER = 0x0002, 0x1000
_BEGIN = (
    "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm && "
    "ip link set lo up && echo ready && exec cat"
)


def why_not() -> str | None:
    """Return why such machines can't be created here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--fork", "--mount-proc", "ip", "link"],
        capture_output=True,
        text=True,
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Machine:
    """An isolated machine."""

    def __init__(self, address: str, home: Path) -> None:
        self.address = address
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RAY_")
        } | {"HOME": str(home)}
        home.mkdir()
        flags = "--net --pid --mount --fork --kill-child=KILL --mount-proc".split()
        self._outer = subprocess.Popen(
            ["unshare", *flags, "sh", "-c", _BEGIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def plug_in(self, tap: str) -> None:
        """Connect the machine to a TAP device of the switch."""
        _ip("link", "set", tap, "netns", str(self.pid))
        for command in (
            f"ip addr add {self.address}/24 dev {tap}",
            f"ip link set {tap} up",
            f"ip route add default dev {tap}",
        ):
            self.run(command.split())

    def run(self, command: list[str]) -> Any:
        """Run a command on the machine, and return the completed process."""
        settings: dict[str, Any] = dict(capture_output=True, text=True, check=True)
        return subprocess.run([*self._enter(), *command], env=self.environment, **settings)

    def started(
        self, command: list[str], **settings: Any
    ) -> AbstractContextManager[subprocess.Popen[str]]:
        """Start a command on the machine; it is killed at the end of the block."""
        return started([*self._enter(), *command], env=self.environment, text=True, **settings)

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", "--"]

    def close(self) -> None:
        """Kill all processes of the machine."""
        self._outer.kill()
        self._outer.communicate()


class Switch:
    """An Ethernet switch over TAP devices.

    Attributes:
        delay_s: delay of every frame, in seconds.
        cut: disconnected ports.
    """

    def __init__(self, count: int) -> None:
        self.delay_s = 0.0
        self.cut: set[int] = set()
        self.names = [f"vb{os.getpid() % 100_000}x{port}" for port in range(count)]
        self._taps = [os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK) for _ in self.names]
        for name, tap in zip(self.names, self._taps, strict=True):
            fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
        self._open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._open = False
        self._thread.join()
        for tap in self._taps:
            os.close(tap)

    def _run(self) -> None:
        ports = {tap: port for port, tap in enumerate(self._taps)}
        where: dict[bytes, int] = {}  # the port of each MAC address
        waiting: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while self._open:
            until = waiting[0][0] - time.monotonic() if waiting else 0.2
            for tap in select.select(self._taps, [], [], max(0.0, min(0.2, until)))[0]:
                source, frame = ports[tap], os.read(tap, 1 << 16)
                where[frame[6:12]] = source
                known = where.get(frame[:6])
                for port in range(len(self._taps)) if known is None else (known,):
                    if port != source and not {port, source} & self.cut:
                        due = time.monotonic() + self.delay_s
                        heapq.heappush(waiting, (due, next(numbers), port, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, port, frame = heapq.heappop(waiting)
                if port not in self.cut:
                    try:
                        os.write(self._taps[port], frame)
                    except OSError:
                        pass  # a full queue, or a machine that is gone: drop the frame


class Network:
    """Some machines and the switch between them; a context manager."""

    def __init__(self, count: int, folder: Path) -> None:
        self.machines: list[Machine] = []
        self.switch = Switch(count)
        try:
            for port, name in enumerate(self.switch.names):
                self.machines.append(Machine(f"10.77.0.{port + 1}", folder / f"home{port}"))
                self.machines[-1].plug_in(name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for machine in self.machines:
            machine.close()
        self.switch.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
