"""The room of an execution: which files it sees, what it may do, and how a forked child steps into it.

Three kinds. ``namespaces``: own user (or own user id, when root starts it), mount, process, network, IPC and host name
namespaces; the root is put together from read-only binds; nothing but the shim's port is on the network.
``landlock``: file and network rules of the kernel without namespaces, for machines that refuse those. ``none``: limits
only.

The read-only part of the root is built once, in the mount namespace of the fork server (``Template``); a child adds
what is its own (``enter``). That makes a start a few milliseconds of core time.
"""

import os
import sys
from dataclasses import dataclass, field

from opengyre.execute import kernel

HOME = "/home/agent"
WORKSPACE = "/workspace"
KINDS = ("namespaces", "landlock", "none")

_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl", "/etc/localtime", "/etc/mime.types")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_WRITTEN_FILES = {
    "/etc/passwd": "root:x:0:0::/root:/bin/sh\nagent:x:{user}:{group}::/home/agent:/bin/sh\n",
    "/etc/group": "root:x:0:\nagent:x:{group}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "/etc/resolv.conf": "",
}
_OWN_FOLDERS = (HOME, WORKSPACE, "/tmp", "/proc", "/dev/shm", "/run")  # noqa: S108 - inside the room


@dataclass(frozen=True)
class Limits:
    """What an execution may use; 0 means without a limit.

    >>> Limits(memory_bytes=512 << 20).processes
    0
    """

    memory_bytes: int = 0
    """Address space of one process."""
    processes: int = 0
    """Processes and threads at once."""
    disk_bytes: int = 0
    """One file, and each of /tmp and home together."""
    cpu_s: int = 0
    """Core time of one process."""


@dataclass(frozen=True)
class Room:
    """What one child needs to step into its sandbox.

    Example: ``Room(kind="namespaces", workspace="/runs/a/executions/g00001-s00-a0/workspace", user=None)``.
    """

    kind: str
    workspace: str
    """Folder outside; ``/workspace`` inside (``namespaces``)."""
    user: int | None
    """User and group id to change to; None stays (it must be None unless root starts it)."""
    limits: Limits = field(default_factory=Limits)
    port: int = 0
    """``landlock``: the one TCP port that may be connected to."""
    home: str = ""
    """``landlock`` and ``none``: folder outside that serves as home and /tmp."""


def readable_paths() -> list[str]:
    """Return the folders that hold the Python installation, outside the system folders."""
    folders: list[str] = []
    for path in (sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)):
        inside = any(path == known or path.startswith(known + "/") for known in (*_SYSTEM_FOLDERS, *folders))
        if not inside and path != "/":
            folders.append(path)
    return folders


def detach(kind: str) -> None:
    """Give this process (the shim) the network, IPC and host name of the sandbox; its next children get new pids.

    Raises:
        OSError: The kernel refuses.
    """
    if kind != "namespaces":
        kernel.adopt_orphans()
        return
    user, group = os.getuid(), os.getgid()
    flags = kernel.CLONE_NEWNET | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    if user != 0:
        kernel.unshare(kernel.CLONE_NEWUSER | flags)
        kernel.map_own_user(user, group)
    else:
        kernel.unshare(flags)
    kernel.raise_loopback()


class Template:
    """The read-only root that all executions of a fork server share."""

    def __init__(self, folder: str, hidden: tuple[str, ...]) -> None:
        self.folder = folder
        """Where it is mounted, outside."""
        self.hidden = hidden
        """Folders whose contents no execution may see."""

    def build(self) -> None:
        """Make a private mount namespace for this process and put the root together in it.

        Raises:
            OSError: The kernel refuses namespaces or mounts.
        """
        user, group = os.getuid(), os.getgid()
        if user != 0:
            kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
            kernel.map_own_user(user, group)
        else:
            kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_SLAVE)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("tmpfs", self.folder, "tmpfs", flags, "size=1m,mode=755")
        for path in _OWN_FOLDERS:
            os.makedirs(self.folder + path, exist_ok=True)
        for path in (*_SYSTEM_FOLDERS, *readable_paths()):
            self._show(path)
        os.makedirs(self.folder + "/etc", exist_ok=True)
        for path in _SYSTEM_FILES:
            self._show(path)
        for path, text in _WRITTEN_FILES.items():
            with open(self.folder + path, "w") as file:
                file.write(text.format(user=user, group=group))
        for path in self.hidden:
            if os.path.isdir(self.folder + path):
                kernel.mount("tmpfs", self.folder + path, "tmpfs", flags | kernel.MS_RDONLY, "size=4k,mode=755")
        kernel.make_read_only(self.folder)
        self._add_devices()

    def _show(self, path: str) -> None:
        target = self.folder + path
        if os.path.islink(path) and path.count("/") == 1:
            os.symlink(os.readlink(path), target)
        elif os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
            kernel.bind(path, target)
        elif os.path.exists(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "w"):
                pass
            kernel.bind(os.path.realpath(path), target)

    def _add_devices(self) -> None:
        folder = self.folder + "/dev"
        flags = kernel.MS_NOSUID
        kernel.mount("tmpfs", folder, "tmpfs", flags, "size=64k,mode=755")
        for name in _DEVICES:
            with open(f"{folder}/{name}", "w"):
                pass
            kernel.bind(f"/dev/{name}", f"{folder}/{name}")
        for name, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1")):
            os.symlink(target, f"{folder}/{name}")
        os.symlink("/proc/self/fd/2", f"{folder}/stderr")
        os.mkdir(f"{folder}/shm", 0o777)
        kernel.mount("none", folder, None, kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | flags)


def enter(room: Room, template: Template | None) -> str:
    """Step into the room for good and return the working folder inside.

    Call it in a fresh child of a process that called ``detach``; afterwards the child holds no privilege.

    Raises:
        OSError: The kernel refuses.
    """
    if room.kind == "namespaces":
        if template is None:
            raise OSError(22, "a room of kind namespaces needs a template")
        _enter_root(room, template)
        folder = WORKSPACE
    else:
        folder = room.workspace
    os.chdir(folder)
    os.umask(0o022)
    kernel.give_up_privileges(room.user)
    kernel.die_with_parent()
    limits = room.limits
    kernel.limit_resources(
        memory_bytes=limits.memory_bytes,
        processes=limits.processes,
        file_bytes=limits.disk_bytes,
        cpu_s=limits.cpu_s,
    )
    if room.kind == "landlock":
        system = [path for path in (*_SYSTEM_FOLDERS, *_SYSTEM_FILES, *readable_paths(), "/etc") if os.path.exists(path)]
        devices = [f"/dev/{name}" for name in _DEVICES]
        kernel.restrict_files(readable=system, writable=[room.workspace, room.home, *devices], port=room.port)
    if room.kind != "none":
        kernel.forbid_calls()
    return folder


def _enter_root(room: Room, template: Template) -> None:
    kernel.unshare(kernel.CLONE_NEWNS)
    root = template.folder
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # Mounts that came from the namespace of another user are locked; a recursive bind of them is not.
    kernel.bind(root, root)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount(room.workspace, root + WORKSPACE, None, kernel.MS_BIND)
    kernel.mount("none", root + WORKSPACE, None, kernel.MS_BIND | kernel.MS_REMOUNT | flags)
    size = f"size={room.limits.disk_bytes or '50%'},nr_inodes=16384"
    owner = os.getuid() if room.user is None else room.user
    kernel.mount("tmpfs", root + "/tmp", "tmpfs", flags, f"{size},mode=1777")
    os.mkdir(root + "/tmp/.home", 0o700)
    os.chown(root + "/tmp/.home", owner, -1)
    kernel.bind(root + "/tmp/.home", root + HOME)
    os.mkdir(root + "/tmp/.shm")
    os.chmod(root + "/tmp/.shm", 0o1777)
    kernel.bind(root + "/tmp/.shm", root + "/dev/shm")  # noqa: S108 - inside the room
    try:
        kernel.mount("proc", root + "/proc", "proc", flags | kernel.MS_NOEXEC)
    except PermissionError:
        # A container that masks parts of its own /proc forbids a new one: the room then has none.
        pass
    kernel.enter_root(root)
