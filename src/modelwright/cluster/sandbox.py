"""Pods as processes of this machine: with namespaces (root) or plain; and the git clone of an init container.

With root each pod has namespaces, a random user id and no capability, over a copy-on-write view of this machine as its
image. Without root the same commands run as plain processes, with paths and names substituted for mounts and DNS."""

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
from typing import IO, Any, Protocol

import modelwright
from modelwright.errors import UsageError

USER_ID = 1_000_660_000
"""A user id as OpenShift assigns it: from the namespace's range, in no passwd file."""
SUBNET = "10.77.0"
PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
HOST_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
SOURCE_ROOT = Path(modelwright.__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mount:
    """A folder that a container sees."""

    source: Path
    """Where it is on this machine."""
    target: str
    """Where the container sees it."""
    read_only: bool = False


@dataclass(frozen=True)
class ContainerSpec:
    """One container to be started."""

    pod: str
    """Name of its pod."""
    pod_index: int
    """Number of its pod, which decides its address."""
    command: list[str]
    """What is run."""
    env: dict[str, str]
    """Its complete environment."""
    working_dir: str
    """Its working directory."""
    mounts: tuple[Mount, ...]
    """What it sees."""
    hosts: dict[str, int]
    """Names of pods and their numbers."""


class Sandbox(Protocol):
    """Starts containers."""

    not_simulated: tuple[str, ...]

    def start(self, spec: ContainerSpec, log: IO[bytes]) -> Container: ...
    def disconnect(self, pod_index: int) -> None: ...
    def reconnect(self, pod_index: int) -> None: ...
    def close(self) -> None: ...


@dataclass
class Container:
    """A container that runs."""

    process: subprocess.Popen[bytes]
    """What was started."""
    has_init_child: bool
    """Whether the first process inside is a child of it."""
    killed: bool = False
    """Whether it was sent SIGKILL, which unshare turns into a plain 1."""

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to the container's first process."""
        pid = self.process.pid
        if self.has_init_child:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            child_pids = children.read_text().split() if children.exists() else []
            pid = int(child_pids[0]) if child_pids else pid
        if self.process.poll() is None:
            self.killed |= signum == signal.SIGKILL
            descendants = process_tree(pid) if signum == signal.SIGKILL and not self.has_init_child else []
            with suppress(ProcessLookupError):
                os.kill(pid, signum) if self.has_init_child else os.killpg(pid, signum)
            for descendant in descendants:
                with suppress(ProcessLookupError):
                    os.kill(descendant, signum)

    def exit_code(self) -> int | None:
        """The exit code as Kubernetes reports it, once there is one."""
        code = self.process.poll()
        if code and self.killed:
            return 128 + signal.SIGKILL
        return code if code is None or code >= 0 else 128 - code


@dataclass
class NamespaceSandbox:
    """Pods with namespaces of their own; needs root."""

    root_dir: Path
    """A folder for roots and host files."""
    count: int
    """Pods."""
    not_simulated: tuple[str, ...] = (
        "the image's content (this machine's Python is used instead)",
        "scheduling, quota, GPUs, NCCL and RDMA",
        "the cluster's own admission hooks and network policies",
    )
    _created: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._name = f"mw{os.getpid():x}"
        self._hub = f"{self._name}hub"
        try:
            self._add(self._hub)
            _run("ip", "-n", self._hub, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", self._hub, "link", "set", "br0", "up")
            for index in range(self.count):
                self._add(self._namespace(index))
                near, far = f"{self._name}a{index}"[:15], f"{self._name}b{index}"[:15]
                _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
                _run("ip", "link", "set", near, "netns", self._hub)
                _run("ip", "link", "set", far, "netns", self._namespace(index))
                _run("ip", "-n", self._hub, "link", "set", near, "master", "br0", "up")
                _run("ip", "-n", self._namespace(index), "link", "set", far, "name", "eth0")
                _run("ip", "-n", self._namespace(index), "addr", "add", f"{_address(index)}/24", "dev", "eth0")
                self.reconnect(index)
                _run("ip", "-n", self._namespace(index), "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def start(self, spec: ContainerSpec, log: IO[bytes]) -> Container:
        script = self.root_dir / f"{spec.pod}.sh"
        script.write_text(self._script(spec), encoding="utf-8")
        pdeathsig = ["setpriv", "--pdeathsig", "KILL"]  # a pod does not outlive the simulation, however that ends
        enter = ["ip", "netns", "exec", self._namespace(spec.pod_index)]
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "bash", str(script)]
        env = {"HOME": "/", **spec.env, "PATH": HOST_PATH}  # not in the script: a secret stays off the disk
        return Container(_start([*pdeathsig, *enter, *unshare], log, env), has_init_child=True)

    def disconnect(self, pod_index: int) -> None:
        """Take the network of a pod's node down."""
        _run("ip", "-n", self._namespace(pod_index), "link", "set", "eth0", "down")

    def reconnect(self, pod_index: int) -> None:
        """Bring the network up again, as on another node."""
        _run("ip", "-n", self._namespace(pod_index), "link", "set", "eth0", "up")

    def close(self) -> None:
        for name in self._created:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        self._created.clear()

    def _add(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._created.append(name)

    def _namespace(self, pod_index: int) -> str:
        return f"{self._name}p{pod_index}"

    def _script(self, spec: ContainerSpec) -> str:
        """The script that sets up a container: its own root, its volumes, and last a user without privileges."""
        base = self.root_dir / f"{spec.pod}.root"
        base.mkdir(exist_ok=True)
        files = {"hosts": _hosts(spec), "resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"}
        for name, text in files.items():
            (self.root_dir / f"{spec.pod}.{name}").write_text(text, encoding="utf-8")
        root = shlex.quote(str(base / "root"))
        lines = [
            "set -e",
            "mount --make-rprivate /",
            f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(base))}",
            f"cd {shlex.quote(str(base))} && mkdir upper work root",
            "mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root",
            *(f"chmod a+x {root}{shlex.quote(str(folder))}" for folder in _untraversable_dirs()),
            f"mount --rbind /sys {root}/sys && mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc",
            f"mount -t tmpfs tmpfs {root}/dev/shm",
        ]
        for mount in spec.mounts:
            target = root + shlex.quote(mount.target)
            lines.append(f"mkdir -p {target} && mount --bind {shlex.quote(str(mount.source))} {target}")
            lines += [f"mount -o remount,bind,ro {target}"] if mount.read_only else []
        for name in files:
            source = shlex.quote(str(self.root_dir / f"{spec.pod}.{name}"))
            lines.append(f"touch {root}/etc/{name} && mount --bind {source} {root}/etc/{name}")
        drop = "--inh-caps=-all --ambient-caps=-all --bounding-set=-all --no-new-privs --pdeathsig KILL"
        path = shlex.quote(f"PATH={spec.env.get('PATH', PATH)}")
        enter = ["sh", "-c", 'cd "$0" && umask 002 && exec "$@"', spec.working_dir, *spec.command]
        lines += [
            f"hostname {shlex.quote(spec.pod)}",
            f"exec chroot {root} setpriv --reuid={USER_ID} --regid=0 --clear-groups {drop} "
            f"env {path} {shlex.join(enter)}",
        ]
        return "\n".join(lines) + "\n"


@dataclass
class ProcessSandbox:
    """The same rules without root: one network, one root, one user for all."""

    root_dir: Path
    """A folder of its own."""
    not_simulated: tuple[str, ...] = (
        "the random user id, dropped capabilities and HOME=/ (run it as root)",
        "networks, names and mounts of the pods' own: paths, addresses and a free port are used instead",
        "a lost node's network: its processes are killed, but the network stays up",
        "the image's content, scheduling, quota, GPUs, NCCL and RDMA",
    )
    port: str = field(default_factory=lambda: _free_port())
    """Master port: the job's own may be in use on a shared network."""

    def start(self, spec: ContainerSpec, log: IO[bytes]) -> Container:
        local_paths, copies = {mount.target: str(mount.source) for mount in spec.mounts}, []
        for index, mount in enumerate(spec.mounts):
            if mount.read_only:  # a ConfigMap: its files contain pod paths, so each pod gets its own copy
                own_copy = self.root_dir / f"{spec.pod}.map{index}"
                shutil.rmtree(own_copy, ignore_errors=True)
                copies.append(shutil.copytree(mount.source, own_copy))
                local_paths[mount.target] = str(own_copy)
        longest_first = sorted(map(re.escape, local_paths), key=len, reverse=True)
        pattern = re.compile(rf"(?<![\w./-])({'|'.join(longest_first) or '(?!)'})(?![\w.-])")

        def local(text: str) -> str:
            return pattern.sub(lambda match: local_paths[match[1]], text)

        for file in (file for copy in copies for file in copy.glob("*.yaml")):
            file.write_text(local(file.read_text(encoding="utf-8")), encoding="utf-8")
        names = dict.fromkeys(spec.hosts, "127.0.0.1")
        values = {name: names.get(value, local(value)) for name, value in spec.env.items()}
        values |= {name: self.port for name in values if name.endswith("MASTER_PORT")}
        setpriv = shutil.which("setpriv")  # a pod does not outlive the simulation
        pdeathsig = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        command = [*pdeathsig, *(local(arg) for arg in spec.command)]
        env = {"PATH": PATH, "HOME": str(self.root_dir), **values}
        return Container(_start(command, log, env, local(spec.working_dir)), has_init_child=False)

    def disconnect(self, pod_index: int) -> None:
        """All pods share one network, so nothing is disconnected; the process is killed later all the same."""

    def reconnect(self, pod_index: int) -> None:
        """Nothing was disconnected."""

    def close(self) -> None:
        """There is nothing to remove."""


def can_use_namespaces() -> bool:
    """Whether this machine lets us make namespaces."""
    tools = all(shutil.which(name) for name in ("ip", "unshare", "setpriv", "chroot", "mount", "bash"))
    return sys.platform == "linux" and os.geteuid() == 0 and tools


def _start(command: list[str], log: IO[bytes], env: dict[str, str], cwd: str | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=cwd, env=env,
                            start_new_session=True)  # fmt: skip


def _address(pod_index: int) -> str:
    return f"{SUBNET}.{pod_index + 10}"


def _hosts(spec: ContainerSpec) -> str:
    lines = ["127.0.0.1 localhost", *(f"{_address(pod_index)} {name}" for name, pod_index in spec.hosts.items())]
    return "\n".join(lines) + "\n"


def _untraversable_dirs() -> list[Path]:
    """Parent folders of Python and of this package that other users may not traverse; opened in the pod's view only."""
    paths = [Path(sys.executable).absolute(), Path(sys.executable).resolve(), SOURCE_ROOT, Path(sys.prefix)]
    folders = {folder for path in paths for folder in path.parents}
    return sorted(folder for folder in folders if folder.is_dir() and not folder.stat().st_mode & 0o001)


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants: torchrun starts each rank in its own session, which a group signal misses."""
    pids = [pid]
    for member in pids:
        for children in Path(f"/proc/{member}/task").glob("*/children"):
            with suppress(OSError):
                pids += map(int, children.read_text().split())
    return pids


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{shlex.join(command)}: {done.stderr.strip()}; the simulation needs network namespaces")


def kill_all(containers: Sequence[Container]) -> None:
    """Kill all containers and wait for them."""
    for container in containers:
        container.signal(signal.SIGKILL)
        if container.process.poll() is None:
            container.process.kill()
        container.process.wait()


GIT_COMMAND = re.compile(r"\bgit\b.*\b(clone|fetch|pull)\b", re.DOTALL)
REMOTE_URL = re.compile(r"(?:https?|ssh|git)://[^\s\"';&]+|\b[\w.-]+@[\w.-]+:[^\s\"';&]+")
LOCAL_PATH = re.compile(r"(?:file://|(?<![\w./:-]))(/[^\s\"';&]+)")
REPO_MOUNT = "/simulation/repository.git"
"""Where the init container sees the repository."""


@dataclass(frozen=True)
class GitClone:
    """A git clone of an init container."""

    url: str
    """The repository, as its command names it."""
    local_repo: Path | None
    """The repository of this machine that is cloned; None if the URL is remote."""

    @property
    def redacted_url(self) -> str:
        """The URL without user name and password."""
        return re.sub(r"(?<=//)[^/@]*@", "", self.url) or "a repository"

    def rewrite_args(self, args: list[str]) -> list[str]:
        """The command with the local repository instead of the URL."""
        return [arg.replace(self.url, REPO_MOUNT) for arg in args]

    def mount(self, work_dir: Path, use_namespaces: bool) -> Mount:
        """A bare copy of the repository, which the pod's user may read whoever owns the original."""
        assert self.local_repo is not None
        copy = work_dir / "repository.git"
        shutil.rmtree(copy, ignore_errors=True)
        command = ["git", "-c", "safe.directory=*", "clone", "--quiet", "--bare", "--no-hardlinks"]
        try:
            command += [str(self.local_repo), str(copy)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise UsageError("git is not on the PATH; the simulation clones with it") from None
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["git failed"]
            raise UsageError(f"{self.local_repo} cannot be cloned ({last[0]}); --git-repo wants a git repository")
        if use_namespaces:  # git refuses a repository of another user
            for path in (copy, *copy.rglob("*")):
                os.chown(path, USER_ID, 0)
        return Mount(copy, REPO_MOUNT)


def find_git_clone(container: dict[str, Any], git_repo: str | None) -> GitClone | None:
    """What a container clones, where it clones."""
    line = " ".join(str(arg) for key in ("command", "args") for arg in container.get(key) or [])
    if not GIT_COMMAND.search(line):
        return None
    stand_in = Path(git_repo.removeprefix("file://")) if git_repo else None
    if match := REMOTE_URL.search(line):
        return GitClone(match[0], stand_in)
    for match in LOCAL_PATH.finditer(line):
        if any((Path(match[1]) / name).exists() for name in ("HEAD", ".git")):
            return GitClone(match[0], stand_in or Path(match[1]))
    return GitClone("", None)
