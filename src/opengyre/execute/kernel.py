"""The system calls that isolate a process, through ctypes: namespaces, mounts, capabilities, Landlock and seccomp.

Only the fork server and its children use this module. It needs the standard library and Linux; every function
raises ``OSError`` with the errno of the call that failed.
"""

import ctypes
import fcntl
import os
import platform
import resource
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
_MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2

_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT_SELF = 446
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

_PLATFORM_CALLS: dict[str, dict[str, int]] = {
    "x86_64": {"pivot_root": 155, "audit": 0xC000003E},
    "aarch64": {"pivot_root": 41, "audit": 0xC00000B7},
}

_FORBIDDEN_CALLS: dict[str, tuple[int, ...]] = {
    # ptrace, mount, umount2, pivot_root, swapon, swapoff, reboot, init_module, delete_module, add_key, request_key,
    # keyctl, unshare, perf_event_open, setns, finit_module, process_vm_readv, process_vm_writev, kexec_load, bpf,
    # userfaultfd, open_tree, move_mount, fsopen, fsconfig, fsmount, mount_setattr
    "x86_64": (
        *(101, 165, 166, 155, 167, 168, 169, 175, 176, 248, 249, 250, 272, 298, 308, 313, 310, 311, 246, 321, 323),
        *(428, 429, 430, 431, 432, 442),
    ),
    "aarch64": (
        *(117, 40, 39, 41, 224, 225, 142, 105, 106, 217, 218, 219, 97, 241, 268, 273, 270, 271, 104, 280, 282),
        *(428, 429, 430, 431, 432, 442),
    ),
}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Leave the namespaces in ``flags`` for new ones."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def map_own_user(user: int, group: int) -> None:
    """Inside a fresh user namespace: keep this user and group under their own ids, and no others."""
    with open("/proc/self/setgroups", "w") as file:
        file.write("deny")
    with open("/proc/self/uid_map", "w") as file:
        file.write(f"{user} {user} 1")
    with open("/proc/self/gid_map", "w") as file:
        file.write(f"{group} {group} 1")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call ``mount(2)``."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode() if data else None
    )
    _check(result, f"mount {source} on {target}")


def make_read_only(target: str) -> None:
    """Make a mount and all mounts below it read-only, without setuid and device files.

    Choice: ``mount_setattr`` (Linux 5.12) does the whole tree at once; older kernels remount the top only.
    """
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(target.encode()),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.c_char_p(attributes),
        ctypes.c_size_t(len(attributes)),
    )
    if result < 0:
        locked = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC | 1024 | 2048)
        mount("none", target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | locked)


def bind(source: str, target: str) -> None:
    """Show ``source`` (a folder or file) at ``target``, with the mounts below it."""
    mount(source, target, None, MS_BIND | MS_REC)


def enter_root(folder: str) -> None:
    """Make ``folder``, a mount point, the root and let the old root go."""
    call = _PLATFORM_CALLS[platform.machine()]["pivot_root"]
    os.chdir(folder)
    _check(_libc.syscall(ctypes.c_long(call), ctypes.c_char_p(b"."), ctypes.c_char_p(b".")), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def raise_loopback() -> None:
    """Bring the loopback interface of a fresh network namespace up."""
    get_flags, set_flags, is_up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, get_flags, request))[1]
        fcntl.ioctl(control, set_flags, struct.pack("16sh14x", b"lo", flags | is_up))


def die_with_parent() -> None:
    """Be killed when the parent ends; call it after the last change of user."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def give_up_privileges(user: int | None) -> None:
    """Change to an ordinary user (None: stay), drop all capabilities for good and forbid new privileges."""
    last = 40
    for capability in range(last + 1):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = struct.pack("Ii", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def limit_resources(*, memory_bytes: int, processes: int, file_bytes: int, cpu_s: int) -> None:
    """Set the limits of a process and of what it starts; 0 leaves one as it is."""
    for what, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        if value or what == resource.RLIMIT_CORE:
            hard = resource.getrlimit(what)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(what, (value, value))


def forbid_calls() -> None:
    """Install a seccomp filter: calls that make namespaces, mounts, modules, or reach into other processes fail.

    Choice: a list of forbidden calls, not of allowed ones: harnesses bring runtimes (Node, Bun, Rust) whose calls
    nobody can list; what the namespaces already stop need not be stopped twice.
    """
    machine = platform.machine()
    load_word, jump_equal, answer = 0x20, 0x15, 0x06
    allow, kill, permission = 0x7FFF0000, 0x80000000, 0x00050001
    calls = _FORBIDDEN_CALLS[machine]
    program = [
        struct.pack("HBBI", load_word, 0, 0, 4),
        struct.pack("HBBI", jump_equal, 1, 0, _PLATFORM_CALLS[machine]["audit"]),
        struct.pack("HBBI", answer, 0, 0, kill),
        struct.pack("HBBI", load_word, 0, 0, 0),
    ]
    for index, call in enumerate(calls):
        program.append(struct.pack("HBBI", jump_equal, len(calls) - index, 0, call))
    program.append(struct.pack("HBBI", answer, 0, 0, allow))
    program.append(struct.pack("HBBI", answer, 0, 0, permission))
    code = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "prctl(PR_SET_SECCOMP)")


_LANDLOCK_READ = 0b1101  # execute, read file, read folder
_LANDLOCK_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_LANDLOCK_FILES_NEWEST = (1 << 16) - 1
_LANDLOCK_ON_A_FILE = 0b1000000000000110 | 1 | (1 << 14)
_LANDLOCK_NET = 0b11  # bind, connect
_LANDLOCK_SCOPES = 0b11  # abstract sockets, signals


def landlock_version() -> int:
    """Return the kernel's Landlock ABI; 0 if it has none."""
    return max(0, int(_libc.syscall(ctypes.c_long(_SYS_LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), 1)))


def restrict_files(*, readable: list[str], writable: list[str], port: int) -> None:
    """Confine this process with Landlock to these paths and to TCP connections to ``port``.

    Needs ABI 4 (Linux 6.7) for the network rule; on ABI 6 signals and abstract sockets are confined too. Call
    ``give_up_privileges`` first.
    """
    version = landlock_version()
    files = _LANDLOCK_FILES.get(version, _LANDLOCK_FILES_NEWEST)
    scopes = _LANDLOCK_SCOPES if version >= 6 else 0
    attributes = struct.pack("QQQ", files, _LANDLOCK_NET, scopes)[: 24 if version >= 6 else 16]
    ruleset = _check(
        _libc.syscall(
            ctypes.c_long(_SYS_LANDLOCK_CREATE_RULESET), attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
        ),
        "landlock_create_ruleset",
    )
    for path, access in [(path, _LANDLOCK_READ) for path in readable] + [(path, files) for path in writable]:
        if not os.path.isdir(path):
            access &= _LANDLOCK_ON_A_FILE
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _add_rule(ruleset, 1, struct.pack("=Qi", access & files, descriptor), f"landlock rule for {path}")
        os.close(descriptor)
    _add_rule(ruleset, 2, struct.pack("QQ", 0b10, port), f"landlock rule for port {port}")
    _check(
        _libc.syscall(ctypes.c_long(_SYS_LANDLOCK_RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint(0)),
        "landlock_restrict_self",
    )
    os.close(ruleset)


def _add_rule(ruleset: int, kind: int, rule: bytes, what: str) -> None:
    result = _libc.syscall(
        ctypes.c_long(_SYS_LANDLOCK_ADD_RULE), ctypes.c_int(ruleset), ctypes.c_int(kind), rule, ctypes.c_uint(0)
    )
    _check(result, what)
