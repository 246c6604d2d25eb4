"""A sandbox made by the process itself: fresh namespaces, a private root, no privileges. Standard library only.

``enter_namespaces`` is called by the shim (it keeps the old mounts and so reaches the proxy's socket); ``enter_root``
by its child, which is process 1 of the new process namespace and can only see what is mounted for it.
"""

import ctypes
import fcntl
import os
import resource
import socket
import stat
import struct
import sys

from gyre_shim.processes import processes_of_user

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2, 4, 8, 32, 4096, 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = (
    "/etc/alternatives",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/nsswitch.conf",
    "/etc/ssl",
)
WORKSPACE = "/gyre"
"""Where a sandbox shows its workspace: a name that no interpreter or project lies under."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


class SandboxError(Exception):
    """A step of the set-up was refused; the message names it."""


def _check(result: int, step: str) -> None:
    if result != 0:
        raise SandboxError(f"{step}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _check(result, f"mount {kind or source} on {target}")


def enter_namespaces() -> None:
    """Leave the network, process, ipc and host-name namespaces, as an ordinary user through a user namespace.

    Raises:
        SandboxError: The kernel refuses.
    """
    flags = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    user, group = os.getuid(), os.getgid()
    if user:
        _check(_libc.unshare(CLONE_NEWUSER), "unshare user namespace")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    _check(_libc.unshare(flags), "unshare network, process, ipc and host-name namespaces")
    _raise_loopback()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _raise_loopback() -> None:
    """Bring the loopback interface of a new network namespace up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14s", b"lo", 0x1 | 0x40, b"")
        fcntl.ioctl(probe, 0x8914, request)


def mount_memory(target: str, size_bytes: int) -> None:
    """Put a file system of limited size over a folder, in a mount namespace of this process and its children.

    Raises:
        SandboxError: The kernel refuses.
    """
    _check(_libc.unshare(CLONE_NEWNS), "unshare mount namespace")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size_bytes},mode=755")


def unmount(target: str) -> None:
    """Take a mount away, now or as soon as nothing uses it."""
    _libc.umount2(target.encode(), _MNT_DETACH)


def enter_root(
    *,
    root: str,
    writable: dict[str, str],
    python_prefixes: tuple[str, ...],
    temporary_bytes: int,
    extra: tuple[str, ...] = (),
    user: int = 0,
) -> None:
    """Make a private root and move into its first writable folder.

    Args:
        root: An empty folder that the new root is mounted on.
        writable: Folders that stay writable, apart from ``/tmp``: where they lie to where they are shown.
        python_prefixes: Folders of the interpreter that are not under ``/usr``.
        temporary_bytes: Size of ``/tmp``.
        extra: Further folders to show read-only at their own place.
        user: Id that will be taken inside; 0: that of this process.

    Raises:
        SandboxError: The kernel refuses.
    """
    _check(_libc.unshare(CLONE_NEWNS), "unshare mount namespace")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for name in ("proc", "tmp", "old"):
        os.mkdir(f"{root}/{name}")
    _mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV)
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={temporary_bytes},mode=1777")
    # After /tmp: an interpreter or a harness may be installed below the host's.
    for path in (*SYSTEM_FOLDERS, *SYSTEM_FILES, *python_prefixes, *extra):
        _show(root, path)
    _write_accounts(root, user or os.getuid())
    for path in DEVICES:
        _show(root, path, read_only=False)
    _mount_terminals(root)
    for source, target in writable.items():
        os.makedirs(root + target, exist_ok=True)
        _mount(source, root + target, "", _MS_BIND)
    os.chdir(root)
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise SandboxError(f"pivot_root: no system call number for {os.uname().machine}")
    _check(_libc.syscall(number, root.encode(), f"{root}/old".encode()), "pivot_root")
    os.chdir(next(iter(writable.values())))
    _check(_libc.umount2(b"/old", _MNT_DETACH), "unmount the old root")
    os.rmdir("/old")


def _show(root: str, path: str, *, read_only: bool = True) -> None:
    """Bind a path of the system into the new root, links as links."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(path), target)
        return
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, "", _MS_BIND | _MS_REC)
    if read_only:
        _freeze(target)


def _mount_terminals(root: str) -> None:
    """Give the sandbox terminals of its own, and the links that shells and the C library look for."""
    os.mkdir(f"{root}/dev/pts")
    _mount("devpts", f"{root}/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=600")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "shm": "/tmp"}
    links |= {name: f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))}
    for name, target in links.items():
        os.symlink(target, f"{root}/dev/{name}")


def _freeze(target: str) -> None:
    _mount("none", target, "", _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID)


def _write_accounts(root: str, user: int) -> None:
    """Name the user inside, for programs that ask who they are, and none of the host's other accounts."""
    users, groups = {0: "root", 65534: "nobody"}, {0: "root", 65534: "nogroup"}
    users.setdefault(user, "gyre")
    groups.setdefault(user, "gyre")
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    texts = {
        "passwd": [f"{name}:x:{number}:{number}::/tmp:{shell}" for number, name in users.items()],
        "group": [f"{name}:x:{number}:" for number, name in groups.items()],
    }
    os.makedirs(f"{root}/etc", exist_ok=True)
    for name, lines in texts.items():
        target = f"{root}/etc/{name}"
        _write(target, "\n".join(lines) + "\n")
        _mount(target, target, "", _MS_BIND)
        _freeze(target)


def drop_privileges(
    *, user: int, memory_bytes: int, processes: int, file_bytes: int, cpu_s: int, counts_address_space: bool = True
) -> None:
    """Become an ordinary user without capabilities or ways to get any, under resource limits, to end with the parent.

    As root the process takes the user id ``user``, one for each sandbox: the limit on processes counts by user. An
    ordinary user keeps its own id, and what else it runs at the start is added to the limit.

    Args:
        user: Id to take, as root; 0: none, stay root without capabilities.
        memory_bytes: Memory of one process.
        processes: Processes in the sandbox.
        file_bytes: Largest file.
        cpu_s: Processor time of one process.
        counts_address_space: Limit the address space. False: only private memory that is written, for runtimes that
            reserve far more than they use.
    """
    if os.getuid() == 0 and user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        _limit(resource.RLIMIT_NPROC, processes)
    else:
        already = processes_of_user(os.getuid())
        _clear_capabilities()
        _limit(resource.RLIMIT_NPROC, already + processes)
    die_with_parent()  # only now: the kernel takes the promise back when the user changes
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _limit(resource.RLIMIT_AS if counts_address_space else resource.RLIMIT_DATA, memory_bytes)
    _limit(resource.RLIMIT_FSIZE, file_bytes)
    _limit(resource.RLIMIT_CPU, cpu_s)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, 256 if counts_address_space else 4096)


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    capped = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (capped, capped))


def _clear_capabilities() -> None:
    number = _CAPSET.get(os.uname().machine)
    if number is None:
        raise SandboxError(f"capset: no system call number for {os.uname().machine}")
    header = struct.pack("Ii", 0x20080522, 0)
    _check(_libc.syscall(number, header, bytes(24)), "capset")


def die_with_parent() -> None:
    """Be killed when the parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)


def hide_from_others() -> None:
    """Keep other processes of the same user out of this one's memory and descriptors; undone by an exec."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def give(folders: tuple[str, ...], user: int) -> None:
    """Make a user the owner of folders and all in them."""
    for folder in folders:
        for base, _, files in os.walk(folder):
            os.chown(base, user, user)
            for name in files:
                os.chown(os.path.join(base, name), user, user, follow_symlinks=False)


def python_prefixes() -> tuple[str, ...]:
    """Return the interpreter's folders that ``/usr`` does not hold."""
    folders = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    return tuple(sorted(folder for folder in folders if not folder.startswith("/usr/")))
