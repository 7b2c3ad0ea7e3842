"""This machine as a node: pods as processes with a network, a root, a user id and volumes of their own.

With root each pod has namespaces, a random user id and no capability, over a copy-on-write view of this machine as its
image. Without root the same commands run as plain processes, with paths and names put in place of mounts and DNS.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import modelwright
from modelwright.errors import UsageError

USER_ID = 1_000_660_000
"""A user id as OpenShift gives it: out of the namespace's range, in no password file."""
SUBNET = "10.77.0"
PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
TOOLS = "/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGE = Path(modelwright.__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mount:
    """A folder that a container sees."""

    source: Path
    """Where it is on this machine."""
    target: str
    """Where the container sees it."""
    read_only: bool = False


@dataclass(frozen=True)
class Order:
    """One container to be started."""

    pod: str
    """Name of its pod."""
    number: int
    """Number of its pod, which decides its address."""
    command: list[str]
    """What is run."""
    variables: dict[str, str]
    """Its environment, whole."""
    folder: str
    """Where it stands."""
    mounts: tuple[Mount, ...]
    """What it sees."""
    hosts: dict[str, int]
    """Names of pods and their numbers."""


class Host(Protocol):
    """Starts containers."""

    not_shown: tuple[str, ...]

    def start(self, order: Order, log: IO[bytes]) -> Container: ...
    def cut(self, number: int) -> None: ...
    def mend(self, number: int) -> None: ...
    def close(self) -> None: ...


@dataclass
class Container:
    """A container that runs."""

    process: subprocess.Popen[bytes]
    """What was started."""
    inner: bool
    """Whether the first process inside is a child of it."""
    killed: bool = False
    """Whether it was sent SIGKILL, which unshare turns into a plain 1."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the container's first process."""
        pid = self.process.pid
        if self.inner:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            inside = children.read_text().split() if children.exists() else []
            pid = int(inside[0]) if inside else pid
        if self.process.poll() is None:
            self.killed |= number == signal.SIGKILL
            kin = family(pid) if number == signal.SIGKILL and not self.inner else []
            with suppress(ProcessLookupError):
                os.kill(pid, number) if self.inner else os.killpg(pid, number)
            for each in kin:
                with suppress(ProcessLookupError):
                    os.kill(each, number)

    def ended(self) -> int | None:
        """The exit code as Kubernetes tells it, once there is one."""
        code = self.process.poll()
        if code and self.killed:
            return 128 + signal.SIGKILL
        return code if code is None or code >= 0 else 128 - code


@dataclass
class Namespaces:
    """Pods with namespaces of their own; needs root."""

    place: Path
    """A folder for roots and host files."""
    count: int
    """Pods."""
    not_shown: tuple[str, ...] = (
        "the image's content (this machine's Python stands in for it)",
        "scheduling, quota, GPUs, NCCL and RDMA",
        "the cluster's own admission hooks and network policies",
    )
    _made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._name = f"mw{os.getpid():x}"
        self._hub = f"{self._name}hub"
        try:
            self._add(self._hub)
            _run("ip", "-n", self._hub, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", self._hub, "link", "set", "br0", "up")
            for number in range(self.count):
                self._add(self._space(number))
                near, far = f"{self._name}a{number}"[:15], f"{self._name}b{number}"[:15]
                _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
                _run("ip", "link", "set", near, "netns", self._hub)
                _run("ip", "link", "set", far, "netns", self._space(number))
                _run("ip", "-n", self._hub, "link", "set", near, "master", "br0", "up")
                _run("ip", "-n", self._space(number), "link", "set", far, "name", "eth0")
                _run("ip", "-n", self._space(number), "addr", "add", f"{_address(number)}/24", "dev", "eth0")
                self.mend(number)
                _run("ip", "-n", self._space(number), "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def start(self, order: Order, log: IO[bytes]) -> Container:
        script = self.place / f"{order.pod}.sh"
        script.write_text(self._script(order), encoding="utf-8")
        mortal = ["setpriv", "--pdeathsig", "KILL"]  # a pod does not outlive the rehearsal, however that ends
        command = ["ip", "netns", "exec", self._space(order.number), "unshare", "--mount", "--uts", "--pid", "--fork"]
        started = subprocess.Popen(
            [*mortal, *command, "--kill-child", "bash", str(script)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"HOME": "/", **order.variables, "PATH": TOOLS},  # not in the script: a secret stays off the disk
            start_new_session=True,
        )
        return Container(started, inner=True)

    def cut(self, number: int) -> None:
        """Pull the cable of a pod's node."""
        _run("ip", "-n", self._space(number), "link", "set", "eth0", "down")

    def mend(self, number: int) -> None:
        """Put it back, as on the next node."""
        _run("ip", "-n", self._space(number), "link", "set", "eth0", "up")

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        self._made.clear()

    def _add(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._made.append(name)

    def _space(self, number: int) -> str:
        return f"{self._name}p{number}"

    def _script(self, order: Order) -> str:
        """What makes the container: a root of its own, its volumes, and last a user without any right."""
        base = self.place / f"{order.pod}.root"
        base.mkdir(exist_ok=True)
        files = {"hosts": _hosts(order), "resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"}
        for name, text in files.items():
            (self.place / f"{order.pod}.{name}").write_text(text, encoding="utf-8")
        root = shlex.quote(str(base / "root"))
        lines = [
            "set -e",
            "mount --make-rprivate /",
            f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(base))}",
            f"cd {shlex.quote(str(base))} && mkdir upper work root",
            "mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root",
            *(f"chmod a+x {root}{shlex.quote(str(folder))}" for folder in _closed_folders()),
            f"mount --rbind /sys {root}/sys && mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc",
            f"mount -t tmpfs tmpfs {root}/dev/shm",
        ]
        for mount in order.mounts:
            target = root + shlex.quote(mount.target)
            lines.append(f"mkdir -p {target} && mount --bind {shlex.quote(str(mount.source))} {target}")
            lines += [f"mount -o remount,bind,ro {target}"] if mount.read_only else []
        for name in files:
            source = shlex.quote(str(self.place / f"{order.pod}.{name}"))
            lines.append(f"touch {root}/etc/{name} && mount --bind {source} {root}/etc/{name}")
        drop = "--inh-caps=-all --ambient-caps=-all --bounding-set=-all --no-new-privs --pdeathsig KILL"
        path = shlex.quote(f"PATH={order.variables.get('PATH', PATH)}")
        enter = ["sh", "-c", 'cd "$0" && umask 002 && exec "$@"', order.folder, *order.command]
        lines += [
            f"hostname {shlex.quote(order.pod)}",
            f"exec chroot {root} setpriv --reuid={USER_ID} --regid=0 --clear-groups {drop} "
            f"env {path} {shlex.join(enter)}",
        ]
        return "\n".join(lines) + "\n"


@dataclass
class PlainProcesses:
    """The same rules without root: one network, one root, one user for all."""

    place: Path
    """A folder of its own."""
    not_shown: tuple[str, ...] = (
        "the random user id, dropped capabilities and HOME=/ (run it as root)",
        "networks, names and mounts of the pods' own: paths, addresses and a free port are put in their place",
        "a lost node's silence: its processes are killed, but no cable is cut",
        "the image's content, scheduling, quota, GPUs, NCCL and RDMA",
    )
    port: str = field(default_factory=lambda: _free_port())
    """Where the pods meet: the job's own port may be taken on a network that is not theirs alone."""

    def start(self, order: Order, log: IO[bytes]) -> Container:
        places, copies = {mount.target: str(mount.source) for mount in order.mounts}, []
        for number, mount in enumerate(order.mounts):
            if mount.read_only:  # a ConfigMap: its files speak of the pods' paths, so each pod has its own
                own = self.place / f"{order.pod}.map{number}"
                shutil.rmtree(own, ignore_errors=True)
                copies.append(shutil.copytree(mount.source, own))
                places[mount.target] = str(own)
        longest_first = sorted(map(re.escape, places), key=len, reverse=True)
        pattern = re.compile(rf"(?<![\w./-])({'|'.join(longest_first) or '(?!)'})(?![\w.-])")

        def local(text: str) -> str:
            return pattern.sub(lambda found: places[found[1]], text)

        for file in (file for copy in copies for file in copy.glob("*.yaml")):
            file.write_text(local(file.read_text(encoding="utf-8")), encoding="utf-8")
        names = dict.fromkeys(order.hosts, "127.0.0.1")
        values = {name: names.get(value, local(value)) for name, value in order.variables.items()}
        values |= {name: self.port for name in values if name.endswith("MASTER_PORT")}
        setpriv = shutil.which("setpriv")  # a pod does not outlive the rehearsal
        mortal = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        started = subprocess.Popen(
            [*mortal, *(local(word) for word in order.command)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=local(order.folder),
            env={"PATH": PATH, "HOME": str(self.place), **values},
            start_new_session=True,
        )
        return Container(started, inner=False)

    def cut(self, number: int) -> None:
        """One network for all cannot be cut for one; the process is killed later all the same."""

    def mend(self, number: int) -> None:
        """Nothing was cut."""

    def close(self) -> None:
        """Nothing was made."""


def can_isolate() -> bool:
    """Whether this machine lets us make namespaces."""
    tools = all(shutil.which(name) for name in ("ip", "unshare", "setpriv", "chroot", "mount", "bash"))
    return sys.platform == "linux" and os.geteuid() == 0 and tools


def _address(number: int) -> str:
    return f"{SUBNET}.{number + 10}"


def _hosts(order: Order) -> str:
    lines = ["127.0.0.1 localhost", *(f"{_address(number)} {name}" for name, number in order.hosts.items())]
    return "\n".join(lines) + "\n"


def _closed_folders() -> list[Path]:
    """Folders on the way to Python and to us that other users may not pass; they are opened in the pod's view only."""
    places = [Path(sys.executable).absolute(), Path(sys.executable).resolve(), PACKAGE, Path(sys.prefix)]
    folders = {folder for place in places for folder in place.parents}
    return sorted(folder for folder in folders if folder.is_dir() and not folder.stat().st_mode & 0o001)


def family(pid: int) -> list[int]:
    """A process and all that came from it: torchrun gives each rank a session, which its own group's signal misses."""
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{shlex.join(command)}: {done.stderr.strip()}; the rehearsal needs network namespaces")


def stop_all(containers: Sequence[Container]) -> None:
    """Leave nothing behind."""
    for container in containers:
        container.signal(signal.SIGKILL)
        if container.process.poll() is None:
            container.process.kill()
        container.process.wait()
