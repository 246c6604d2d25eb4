"""Tasks with images: the shim's way through a container engine, with a stand-in for the engine."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from tests.execute.test_executions import ASK, StandIn

from opengyre.core.config import decode_config
from opengyre.core.errors import InputError, SandboxError
from opengyre.core.types import EvaluationFailed, Scored, Task
from opengyre.execute.container import ImageStore, find_engine, require_engine
from opengyre.execute.isolation import Isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.live import HarnessPlan, LiveRunner
from opengyre.execute.scoring import SandboxedEvaluator

pytestmark = pytest.mark.skipif(os.getuid() != 0 or not shutil.which("nsenter"), reason="needs root and nsenter")
PYTHON = getattr(sys, "_base_executable", sys.executable)


@pytest.fixture
def place():
    """A folder with an engine in it, and as ``app`` where the engine shows workspaces."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-c"))
    (folder / "image").mkdir()
    (folder / "image" / "given.txt").write_text("from the image")
    shutil.copy(Path(__file__).parent / "engine_stand_in.py", folder / "engine.py")
    engine = folder / "docker"
    engine.write_text(f'#!/bin/sh\nexec {PYTHON} -S {folder}/engine.py "$@"\n')
    engine.chmod(0o755)
    made = [path for path in (Path("/tests"), Path("/logs")) if not path.exists()]
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    for path in made:
        if path.is_dir():
            path.rmdir()


def task_of(place: Path, image: str = "known:1", script: str = "true") -> Task:
    return Task(
        task_id="boxed",
        format="harbor",
        instruction="say hello",
        hidden_files={"tests/test.sh": script},
        test_ids=("reward",),
        artifact=("*",),
        grader="harbor-script-1",
        scoring_limit_s=20.0,
        options={"workdir": str(place / "app"), "environment": {}},
        image=image,
    )


async def run(place: Path, task: Task, script: str):
    server, proxy = ForkServer(place / "log"), StandIn(place / "s")
    await server.start()
    await proxy.start()
    try:
        config = decode_config({"harness": {"timeout_s": 20.0, "overall_timeout_s": 60.0}})
        command = (PYTHON, "-I", "-S", "-c", ASK + script, "{instruction}")
        plan = HarnessPlan(module="", command=command, environment={}, settings={}, files={"own.txt": "at {base_url}"})
        images = ImageStore(str(place / "docker"), place / "images")
        runner = LiveRunner(config, place / "x", server, plan, isolation=Isolation(kind="none"), images=images)
        end = await runner.run("one", task, proxy.path)
        return end, runner.workspace("one"), (place / "x" / "one" / "harness.log").read_text()
    finally:
        await proxy.stop()
        await server.stop()


async def test_a_harness_in_a_container_finds_its_files_and_reaches_the_proxy(place):
    script = """
import json
json.dump({"cwd": os.getcwd(), "given": open("given.txt").read(), "own": open(os.environ["HOME"] + "/own.txt").read(),
           "argv": sys.argv[1:], "interfaces": sorted(os.listdir("/sys/class/net"))}, open("seen.json", "w"))
print(ask())
"""
    end, workspace, log = await run(place, task_of(place), script)
    assert (end.status, end.calls) == (0, 1), log
    seen = json.loads((workspace / "seen.json").read_text())
    assert seen["cwd"] == str(place / "app")
    assert seen["given"] == "from the image"
    assert seen["own"].startswith("at http://127.0.0.1:")
    assert seen["argv"] == ["say hello"]
    assert [path.suffix for path in (place / "state").glob("opengyre-one-*") if path.suffix != ".ready"] == [".gone"]


async def test_a_harness_timeout_ends_everything_in_the_container(place):
    task = task_of(place)
    script = "import subprocess, time; subprocess.Popen(['/bin/sleep', '79.5']); ask(); time.sleep(60)"
    limited = msgspec.structs.replace(task, options={**task.options, "harness_timeout_s": 1.5})
    end, _, log = await run(place, limited, script)
    assert end.timed_out, log
    assert end.calls == 1
    assert not any(b"79.5" in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())


async def test_a_test_script_runs_in_the_image_and_a_broken_image_is_no_zero(place):
    server = ForkServer(place / "log")
    await server.start()
    images = ImageStore(str(place / "docker"), place / "images")
    evaluator = SandboxedEvaluator(
        server, place / "g", workers=1, isolation=Isolation(kind="none"), memory_bytes=1 << 30, images=images
    )
    workspace = place / "work"
    workspace.mkdir()
    (workspace / "hello.txt").write_text("hi")
    script = f"mkdir -p {place}/logs; cp hello.txt /logs/verifier/ && echo 1 > /logs/verifier/reward.txt"
    good = await evaluator.evaluate(task_of(place, script=script), workspace, timed_out=False)
    broken = await evaluator.evaluate(task_of(place, image="gone:1"), workspace, timed_out=False)
    await server.stop()
    assert isinstance(good, Scored)
    assert good.reward == 1.0
    assert isinstance(broken, EvaluationFailed)
    assert "manifest unknown" in broken.reason


def test_without_an_engine_a_task_with_an_image_is_refused_by_name(place):
    if find_engine() is None:
        with pytest.raises(InputError, match="boxed: needs the image known:1"):
            require_engine([task_of(place)])
    with pytest.raises(SandboxError, match="manifest unknown"):
        ImageStore(str(place / "docker"), place / "images").image_of(task_of(place, image="gone:1"))
