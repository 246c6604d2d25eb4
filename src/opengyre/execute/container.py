"""Container engines: which one answers, an image for a task, and what stands in its working folder.

Choice: an image's working folder is copied out once and every workspace starts as a copy of it, because the workspace
lies on the host's disk, where it can be scored after the container is gone.
"""

import hashlib
import shutil
import subprocess
from pathlib import Path

from opengyre.core.errors import InputError, SandboxError
from opengyre.core.types import Task

ENGINES = ("docker", "podman")
_ASK_S = 20.0
_BUILD_S = 3600.0


def find_engine() -> str | None:
    """Return the path of the first container engine that answers."""
    for name in ENGINES:
        path = shutil.which(name)
        if path is not None:
            try:
                ended = subprocess.run([path, "info"], capture_output=True, timeout=_ASK_S)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if ended.returncode == 0:
                return path
    return None


def require_engine(tasks: list[Task]) -> str | None:
    """Return the engine that tasks with images need, None if none has one.

    Raises:
        InputError: A task names an image and no engine answers; the message names the first such task.
    """
    needing = next((task for task in tasks if task.image is not None), None)
    if needing is None:
        return None
    engine = find_engine()
    if engine is None:
        raise InputError(f"{needing.task_id}: {engine_lack(needing)}")
    return engine


def engine_lack(task: Task) -> str:
    """Return what to say of a task with an image where no engine answers."""
    return f"needs the image {task.image}, and no container engine answers here ({' or '.join(ENGINES)})"


class ImageStore:
    """Images and the content of their working folders.

    Args:
        engine: Program of the engine.
        cache: Folder for copies of working folders.
    """

    def __init__(self, engine: str, cache: Path) -> None:
        self.engine = engine
        self._cache = cache
        self._names: dict[str, str] = {}

    def image_of(self, task: Task) -> str:
        """Return the name of a task's image, pulled or built before.

        Raises:
            SandboxError: The engine cannot get it.
        """
        wanted = str(task.image)
        if wanted not in self._names:
            self._names[wanted] = self._built(Path(wanted)) if Path(wanted).is_file() else self._pulled(wanted)
        return self._names[wanted]

    def fill(self, task: Task, workspace: Path) -> None:
        """Copy what stands in the working folder of a task's image into a workspace.

        Raises:
            SandboxError: The engine refuses.
        """
        image, workdir = self.image_of(task), str(task.options.get("workdir") or "/app")
        content = self._cache / hashlib.blake2b(f"{image}\0{workdir}".encode(), digest_size=12).hexdigest()
        if not content.exists():
            self._copy_out(image, workdir, content)
        shutil.copytree(content, workspace, symlinks=True, dirs_exist_ok=True)

    def _copy_out(self, image: str, workdir: str, content: Path) -> None:
        part = content.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        name = self._run("create", image, "/bin/true").strip()
        try:
            self._run("cp", f"{name}:{workdir}/.", str(part))
        except SandboxError as error:
            if "no such" not in str(error).lower() and "could not find" not in str(error).lower():
                raise
        finally:
            self._run("rm", "-f", name)
        part.rename(content)

    def _pulled(self, image: str) -> str:
        try:
            self._run("image", "inspect", image)
        except SandboxError:
            self._run("pull", image, limit_s=_BUILD_S)
        return image

    def _built(self, dockerfile: Path) -> str:
        digest = hashlib.blake2b(digest_size=12)
        for path in sorted(dockerfile.parent.rglob("*")):
            if path.is_file():
                digest.update(path.relative_to(dockerfile.parent).as_posix().encode() + b"\0" + path.read_bytes())
        name = f"opengyre-task:{digest.hexdigest()}"
        try:
            self._run("image", "inspect", name)
        except SandboxError:
            self._run("build", "-t", name, "-f", str(dockerfile), str(dockerfile.parent), limit_s=_BUILD_S)
        return name

    def _run(self, *words: str, limit_s: float = 300.0) -> str:
        try:
            ended = subprocess.run([self.engine, *words], capture_output=True, text=True, timeout=limit_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{self.engine} {words[0]}: {error}") from error
        if ended.returncode:
            reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
            raise SandboxError(f"{self.engine} {' '.join(words[:2])}: {reason}")
        return ended.stdout
