"""The folder of a run: where everything of it lies, and who may write to it.

RUN/config.json       the configuration, as decoded
RUN/ledger.sqlite     calls, executions, outcomes, events, records
RUN/weights/          a file a version; RUN/optimizer/ beside it
RUN/executions/ID/    workspace and shim files of an execution
RUN/bodies/ID.jsonl   its requests and answers, with proxy.keep_bodies
RUN/driver.lock       held by the driver for as long as it lives
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from opengyre.core.config import Config
from opengyre.core.errors import InputError, RunError

FREE_BYTES_NEEDED = 256 * 1024 * 1024


class RunFolder:
    """Paths of a run and the lock of its driver.

    Example: ``RunFolder.create(Path("runs/first"), config)`` makes a new run, ``RunFolder.reopen(Path("runs/first"))``
    goes on with it; both hold the lock until ``close``.
    """

    def __init__(self, path: Path, config: Config, lock: int) -> None:
        self.path = path
        self.config = config
        self._lock = lock
        self.sockets = _make_private(socket_folder(path))

    @classmethod
    def create(cls, path: Path, config: Config) -> "RunFolder":
        """Make a new run folder.

        Raises:
            InputError: The folder exists and is not empty, cannot be made, or the disk is nearly full.
        """
        path = path.resolve()
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{path}: exists already; continue it with --resume, or name another folder with --run")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{path}: cannot be made: {error.strerror}") from error
        free_bytes = shutil.disk_usage(path).free
        if free_bytes < FREE_BYTES_NEEDED:
            raise InputError(f"{path}: {free_bytes} bytes free, a run needs at least {FREE_BYTES_NEEDED}")
        lock = _hold_lock(path)
        for name in ("weights", "optimizer", "executions"):
            (path / name).mkdir()
        (path / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        return cls(path, config, lock)

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Go on with an existing run.

        Raises:
            InputError: The folder holds no run, or another driver is at work in it.
        """
        path = path.resolve()
        config = read_config(path)
        return cls(path, config, _hold_lock(path))

    @property
    def weights(self) -> Path:
        """Folder of the weight files."""
        return self.path / "weights"

    @property
    def optimizer(self) -> Path:
        """Folder of the optimizer states."""
        return self.path / "optimizer"

    @property
    def executions(self) -> Path:
        """Folder with a folder an execution."""
        return self.path / "executions"

    @property
    def bodies(self) -> Path:
        """Folder with a file an execution, where requests and answers are kept."""
        return self.path / "bodies"

    def close(self) -> None:
        """Give the lock back and remove the sockets."""
        os.close(self._lock)
        shutil.rmtree(self.sockets, ignore_errors=True)


def read_config(path: Path) -> Config:
    """Return the configuration that a run was started with.

    Raises:
        InputError: The folder holds no run.
    """
    try:
        return msgspec.json.decode((path / "config.json").read_bytes(), type=Config)
    except OSError as error:
        raise InputError(f"{path}: holds no run (config.json: {error.strerror})") from error
    except msgspec.DecodeError as error:
        raise InputError(f"{path / 'config.json'}: not the configuration of a run: {error}") from error


def _hold_lock(path: Path) -> int:
    descriptor = os.open(path / "driver.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise InputError(f"{path}: the driver with process id {owner or 'unknown'} is at work in it") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def socket_folder(path: Path) -> Path:
    """Return the folder of a run's sockets: their paths have at most 60 bytes and are the same after a resume."""
    name = hashlib.blake2s(str(path.resolve()).encode(), digest_size=5).hexdigest()
    return Path(tempfile.gettempdir() if len(tempfile.gettempdir()) <= 20 else "/tmp") / f"gyre-{name}"


def _make_private(folder: Path) -> Path:
    """Make the folder for this user alone.

    Raises:
        RunError: It exists and belongs to somebody else.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RunError(f"{folder}: belongs to user {folder.stat().st_uid}, expected {os.getuid()}")
    return folder
