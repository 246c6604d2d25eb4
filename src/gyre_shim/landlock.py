"""Confinement without namespaces: Landlock for files and TCP, seccomp for everything else. Standard library only.

The second choice, for machines that refuse namespaces. A process that went through ``confine`` reads the system,
writes its own folders, reaches one TCP port and nothing else: no other socket family, no signal to a stranger, no way
to a namespace, a module, a keyring or another process's memory. What it cannot give, and namespaces can: a private
view of the file system (paths are those of the host) and a loopback interface of its own.
"""

import ctypes
import errno
import os
import struct

from gyre_shim.sandbox import DEVICES, SYSTEM_FILES, SYSTEM_FOLDERS, SandboxError

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls with one number on every architecture."""
_RULE_PATH_BENEATH, _RULE_NET_PORT = 1, 2
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = (1 << bit for bit in (0, 1, 2, 3, 14, 15))
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_CONNECT_TCP = 2
_ALL_FILE_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of file rights that an ABI knows; later ones know as many as 5."""
_SCOPED = 3
"""Abstract unix sockets and signals stay inside, from ABI 6 on."""
NETWORK_ABI = 4
"""First ABI that confines TCP."""
SIGNAL_ABI = 6
"""First ABI that confines signals."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_NEW_NAMESPACES = 0x7E020080
"""Every CLONE_NEW flag."""
_AF_INET, _AF_INET6, _SOCK_STREAM, _TCP = 2, 10, 1, 6
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKET, _CLONE, _CLONE3 = {"x86_64": 41, "aarch64": 198}, {"x86_64": 56, "aarch64": 220}, 435
_FORBIDDEN = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_setup": (425, 425),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "swapon": (167, 224),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
"""System calls that are refused: name to number on x86_64 and aarch64."""

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the kernel's Landlock ABI, 0 where there is none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def fitting_user(user: int, paths: tuple[str, ...]) -> int:
    """Return the user to run as: the one that is wanted, or this one where the other cannot reach what it needs.

    Without a private root the host's permissions hold, and an interpreter below a closed home folder is out of reach
    for everybody else. Then root stays root without capabilities, and only Landlock keeps its signals inside.

    Raises:
        SandboxError: This one is needed and the kernel cannot confine its signals.
    """
    if os.getuid() or all(_is_open(path) for path in paths):
        return user
    if version() < SIGNAL_ABI:
        shut = next(path for path in paths if not _is_open(path))
        raise SandboxError(f"{shut}: only root can reach it; expected a place that other users may enter")
    return os.getuid()


def _is_open(path: str) -> bool:
    """Whether everybody may enter a folder and all above it."""
    path = os.path.realpath(path)
    while path != "/":
        if not os.stat(path).st_mode & 1:
            return False
        path = os.path.dirname(path)
    return True


def confine(*, writable: tuple[str, ...], readable: tuple[str, ...], port: int | None) -> None:
    """Confine this process and all its children for good.

    Args:
        writable: Folders that may be changed.
        readable: Folders that may be read, beside those of the system.
        port: The one TCP port that may be connected to; None: no TCP at all.

    Raises:
        SandboxError: The kernel refuses, or knows too little of Landlock.
    """
    abi = version()
    if abi < NETWORK_ABI:
        raise SandboxError(f"Landlock ABI {abi}: expected {NETWORK_ABI} or newer (Linux 6.7)")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _restrict(abi, writable, readable, port)
    _filter_system_calls()


def _check(result: int, step: str) -> None:
    if result != 0:
        raise SandboxError(f"{step}: {os.strerror(ctypes.get_errno())}")


def _restrict(abi: int, writable: tuple[str, ...], readable: tuple[str, ...], port: int | None) -> None:
    every = (1 << _ALL_FILE_BITS.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", every, 3, _SCOPED if abi >= SIGNAL_ABI else 0)
    size = 24 if abi >= SIGNAL_ABI else 16
    rules = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    if rules < 0:
        raise SandboxError(f"landlock_create_ruleset: {os.strerror(ctypes.get_errno())}")
    try:
        for path in (*SYSTEM_FOLDERS, *SYSTEM_FILES, *readable):
            _allow_path(rules, path, _READ)
        for path in DEVICES:
            _allow_path(rules, path, _READ_FILE | _WRITE_FILE)
        for path in writable:
            _allow_path(rules, path, every & ~_IOCTL_DEV)
        if port is not None:
            attributes = struct.pack("QQ", _CONNECT_TCP, port)
            _check(_libc.syscall(_ADD_RULE, rules, _RULE_NET_PORT, attributes, 0), f"landlock rule for port {port}")
        _check(_libc.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def _allow_path(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
        attributes = struct.pack("=Qi", rights, place)
        _check(_libc.syscall(_ADD_RULE, rules, _RULE_PATH_BENEATH, attributes, 0), f"landlock rule for {path}")
    finally:
        os.close(place)


def _filter_system_calls() -> None:
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise SandboxError(f"seccomp: no system call numbers for {machine}")
    program = b"".join(_program(machine))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


def _program(machine: str) -> list[bytes]:
    """Return the filter: one instruction of 8 bytes each.

    Choice: a list of what is refused, not of what is allowed: harnesses are unknown programs. Landlock closes files
    and TCP; the list closes the ways round it.
    """
    column = 0 if machine == "x86_64" else 1
    denied = _ERRNO | errno.EPERM
    lines = [
        _line(_LOAD, 4),
        _line(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, 0),
        _line(_GREATER_EQUAL, 0x40000000, 0, 1),
        _line(_RETURN, denied),
        _line(_EQUAL, _CLONE3, 0, 1),
        _line(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for numbers in _FORBIDDEN.values():
        lines += [_line(_EQUAL, numbers[column], 0, 1), _line(_RETURN, denied)]
    lines += [
        _line(_EQUAL, _CLONE[machine], 0, 4),
        _line(_LOAD, 16),
        _line(_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _line(_RETURN, denied),
        _line(_RETURN, _ALLOW),
        _line(_EQUAL, _SOCKET[machine], 1, 0),
        _line(_RETURN, _ALLOW),
    ]
    return lines + _socket_lines(_ERRNO | errno.EACCES)


def _socket_lines(denied: int) -> list[bytes]:
    """Only TCP over IP: other families and protocols (unix, UDP, MPTCP) would pass Landlock by."""
    return [
        _line(_LOAD, 16),
        _line(_EQUAL, _AF_INET, 2, 0),
        _line(_EQUAL, _AF_INET6, 1, 0),
        _line(_RETURN, denied),
        _line(_LOAD, 24),
        _line(_AND, 0xF),
        _line(_EQUAL, _SOCK_STREAM, 1, 0),
        _line(_RETURN, denied),
        _line(_LOAD, 32),
        _line(_EQUAL, 0, 2, 0),
        _line(_EQUAL, _TCP, 1, 0),
        _line(_RETURN, denied),
        _line(_RETURN, _ALLOW),
    ]


def _line(code: int, value: int, on_true: int = 0, on_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, on_true, on_false, value)
