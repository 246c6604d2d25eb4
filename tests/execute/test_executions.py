"""Executions in their sandbox, for real: fork server, shim, namespaces, a harness that is a command."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from aiohttp import web

from opengyre.core.config import Config, decode_config
from opengyre.core.errors import HarnessError
from opengyre.core.types import Task
from opengyre.execute.isolation import Isolation, choose_isolation, try_isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.live import HarnessEnd, HarnessPlan, LiveRunner, live_shims, read_journals

PYTHON = getattr(sys, "_base_executable", sys.executable)
TASK = Task(task_id="t", format="minirepo", instruction="module amber\n", files={"TASK.md": "module amber\n"})
KINDS = {"namespaces": "bubblewrap", "landlock": "landlock"}
REFUSED = {"FileNotFoundError", "PermissionError", "OSError"}
ASK = """
import http.client, os, sys
def ask(body=b"{}"):
    c = http.client.HTTPConnection(os.environ["GYRE_BASE_URL"].split("/")[2], timeout=60)
    c.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    r = c.getresponse(); return r.status, r.read()
"""


class StandIn:
    """A proxy that answers every call with what it is told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ids: list[str] = []
        self.receipts: list[dict] = []
        self.delay_s = 0.0
        self.runner: web.AppRunner | None = None

    async def start(self) -> None:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self.answer)
        application.router.add_post("/_shim/receipt", self.receipt)
        self.runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.UnixSite(self.runner, str(self.path)).start()

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
        self.path.unlink(missing_ok=True)

    async def answer(self, request: web.Request) -> web.Response:
        self.ids.append(request.headers["x-gyre-request-id"])
        await request.read()
        await asyncio.sleep(self.delay_s)
        return web.json_response({"answer": "yes"})

    async def receipt(self, request: web.Request) -> web.Response:
        self.receipts += [json.loads(line) for line in (await request.read()).splitlines()]
        return web.Response(text="ok")


class Bench:
    def __init__(self, folder: Path, isolation: Isolation) -> None:
        self.isolation = isolation
        self.folder = folder
        self.server = ForkServer(folder / "forkserver.log")
        self.proxy = StandIn(folder / "s")

    def runner(self, script: str, **limits: float) -> LiveRunner:
        harness = {key: value for key, value in limits.items() if key.endswith("_s")}
        sandbox = {key: value for key, value in limits.items() if key.endswith("_bytes")}
        table = {"harness": {"timeout_s": 20.0, "overall_timeout_s": 60.0, **harness}, "sandbox": sandbox}
        config: Config = decode_config(table)
        plan = HarnessPlan(module="", command=(PYTHON, "-I", "-S", "-c", ASK + script), environment={}, settings={})
        return LiveRunner(config, self.folder / "x", self.server, plan, isolation=self.isolation)

    async def run(self, script: str, name: str = "one", **limits: float) -> HarnessEnd:
        return await self.runner(script, **limits).run(name, TASK, self.proxy.path)

    def read(self, file: str, name: str = "one") -> str:
        return (self.folder / "x" / name / "workspace" / file).read_text()

    def log(self, name: str = "one") -> str:
        return (self.folder / "x" / name / "harness.log").read_text()


@pytest.fixture(params=["namespaces", "landlock"])
async def bench(request, tmp_path_factory):
    if not try_isolation(request.param).works:
        pytest.skip(f"{request.param} cannot be had here")
    folder = Path(tempfile.mkdtemp(prefix="gyre-x"))
    folder.chmod(0o755)
    made = Bench(folder, choose_isolation(KINDS[request.param]))
    await made.server.start()
    await made.proxy.start()
    yield made
    await made.proxy.stop()
    await made.server.stop()
    shutil.rmtree(folder)


async def test_a_harness_reaches_the_proxy_and_its_answers_are_journalled(bench):
    end = await bench.run("print(ask(), ask())")
    assert (end.status, end.timed_out, end.calls) == (0, False, 2), bench.log()
    assert len(set(bench.proxy.ids)) == 2
    assert [receipt["delivered"] for receipt in bench.proxy.receipts] == ["complete", "complete"]
    journal = read_journals(bench.folder / "x")
    assert [line.request_id for _, line in journal] == bench.proxy.ids


async def test_a_harness_killed_in_mid_answer_gives_exactly_one_hung_up(bench):
    bench.proxy.delay_s = 1.0
    script = """
import threading, time
threading.Thread(target=lambda: (time.sleep(0.3), os._exit(9))).start()
ask()
"""
    end = await bench.run(script)
    assert end.status == 9
    assert [line.delivered.value for _, line in read_journals(bench.folder / "x")] == ["hung_up"]


async def test_requests_are_held_while_no_proxy_answers_and_keep_their_id(bench):
    await bench.proxy.stop()
    running = asyncio.create_task(bench.run("open('asks', 'w').close(); print(ask())"))
    while not (bench.folder / "x" / "one" / "workspace" / "asks").exists() and not running.done():
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    assert not running.done()
    await bench.proxy.start()
    end = await running
    assert end.calls == 1, bench.log()
    assert end.harness_s < end.wall_s - 0.5


async def test_a_harness_timeout_ends_the_harness_and_everything_it_started(bench):
    script = "import subprocess, time; subprocess.Popen(['/bin/sleep', '77.5']); ask(); time.sleep(60)"
    end = await bench.run(script, timeout_s=1.0)
    assert end.timed_out
    assert end.calls == 1
    assert not any(b"77.5" in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())


async def test_a_sandbox_sees_its_own_files_only(bench):
    sibling = bench.folder / "x" / "two"
    script = f"""
import json
def tried(action):
    try: return repr(action())
    except BaseException as error: return type(error).__name__
json.dump({{
    "task": tried(lambda: open("TASK.md").read()),
    "sibling": tried(lambda: open("{sibling}/workspace/TASK.md").read()),
    "run": tried(lambda: os.listdir("{bench.folder}")),
    "root": tried(lambda: sorted(os.listdir("/"))),
    "write_usr": tried(lambda: open("/usr/evil", "w")),
    "write_etc": tried(lambda: open("/etc/passwd", "a")),
    "shadow": tried(lambda: open("/etc/shadow").read()),
    "processes": tried(lambda: sorted(int(name) for name in os.listdir("/proc") if name.isdigit())),
    "user": tried(lambda: os.getuid() != 0 or "root"),
    "terminal": tried(lambda: len(os.openpty())),
    "shared": tried(lambda: __import__("multiprocessing").get_context("spawn").Semaphore(2).get_value()),
    "named": tried(lambda: __import__("pwd").getpwuid(os.getuid()).pw_dir),
    "accounts": tried(lambda: sorted(each.pw_name for each in __import__("pwd").getpwall())),
    "temporary": tried(lambda: open(os.environ["TMPDIR"] + "/mine", "w").write("x")),
}}, open("seen.json", "w"))
ask()
"""
    await bench.run("ask()", name="two")
    end = await bench.run(script)
    assert end.status == 0, bench.log()
    seen = json.loads(bench.read("seen.json"))
    assert seen["task"] == repr("module amber\n")
    assert {seen[name] for name in ("sibling", "run", "write_usr", "write_etc", "shadow")} <= REFUSED
    assert "home" not in seen["root"]
    assert seen["processes"] == "[1]" if bench.isolation.kind == "namespaces" else seen["processes"] in REFUSED
    assert seen["temporary"] == "1"
    if bench.isolation.kind == "namespaces":
        assert (seen["named"], seen["terminal"], seen["shared"]) == (repr("/tmp"), "2", "2")
        assert set(json.loads(seen["accounts"].replace("'", '"'))) <= {"root", "nobody", "gyre"}


async def test_a_sandbox_cannot_signal_what_is_outside_nor_reach_the_network(bench):
    script = f"""
import json, signal, socket
def tried(action):
    try: return repr(action())
    except BaseException as error: return type(error).__name__
json.dump({{
    "signal": tried(lambda: os.kill({os.getpid()}, 0)),
    "network": tried(lambda: socket.create_connection(("10.0.0.1", 80), timeout=1)),
    "outer_loopback": tried(lambda: socket.create_connection(("127.0.0.1", {{port}}), timeout=1)),
    "mount": tried(lambda: os.chroot("/tmp")),
    "datagram": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("10.0.0.1", 53))),
    "unix": tried(lambda: socket.socket(socket.AF_UNIX).connect("{bench.proxy.path}")),
}}, open("seen.json", "w"))
ask()
"""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    await bench.run(script.replace("{port}", str(port)))
    listener.close()
    seen = json.loads(bench.read("seen.json"))
    assert seen["signal"] in ("ProcessLookupError", "PermissionError")
    assert seen["network"] in REFUSED
    assert seen["outer_loopback"] in (*REFUSED, "ConnectionRefusedError")
    assert seen["mount"] == "PermissionError"
    assert seen["datagram"] in (*REFUSED, "None")
    assert seen["unix"] in REFUSED


async def test_a_harness_that_crashes_floods_or_never_asks_is_an_end_like_any_other(bench):
    crashed = await bench.run("raise SystemExit(3)")
    assert (crashed.status, crashed.calls) == (3, 0)
    flooded = await bench.run("ask(); [print('x' * 100000) for _ in range(200)]", name="flood")
    assert flooded.calls == 1
    hungry = await bench.run("ask(); bytearray(4 * 1024 ** 3)", name="hungry")
    assert hungry.calls == 1
    assert hungry.status == 1


async def test_a_live_harness_survives_the_kill_of_the_fork_server(bench):
    bench.proxy.delay_s = 1.0
    running = asyncio.create_task(bench.run("print(ask(), ask())"))
    await asyncio.sleep(0.5)
    assert [name for name, _ in live_shims(bench.folder / "x")] == ["one"]
    os.kill(bench.server._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    end = await running
    assert (end.status, end.calls) == (0, 2), bench.log()
    await asyncio.sleep(0.3)
    assert live_shims(bench.folder / "x") == []


async def test_a_stopped_execution_ends_and_says_so(bench):
    runner = bench.runner("import time; ask(); time.sleep(60)")
    running = asyncio.create_task(runner.run("one", TASK, bench.proxy.path))
    while not bench.proxy.receipts:
        await asyncio.sleep(0.02)
    runner.stop("one")
    end = await running
    assert end.error == "stopped"
    assert end.status == -signal.SIGKILL


async def test_a_harness_ends_with_its_shim(bench):
    running = asyncio.create_task(bench.run("import time; ask(); time.sleep(74.75)"))
    while not bench.proxy.receipts:
        await asyncio.sleep(0.02)
    ((_, mark),) = live_shims(bench.folder / "x")
    os.kill(mark.pid, signal.SIGKILL)
    with pytest.raises(HarnessError, match=r"wrote no exit\.json"):
        await running
    for _ in range(50):
        left = [
            path for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists() and b"74.75" in path.read_bytes()
        ]
        if not left:
            break
        await asyncio.sleep(0.1)
    assert left == []
    assert try_isolation(bench.isolation.kind).works
    assert not list(Path("/sys/fs/cgroup").glob(f"**/opengyre/one-{mark.pid}"))


async def test_a_harness_that_fills_its_workspace_is_ended_and_says_so(bench):
    script = """
import time
ask()
number = 0
while True:
    open(f"file{number}", "wb").write(bytes(1 << 20)); number += 1; time.sleep(0.002)
"""
    end = await bench.run(script, disk_bytes=8 << 20)
    assert end.disk_full
    assert not end.timed_out
    assert end.calls == 1


async def test_a_heap_of_empty_files_fills_a_workspace_too(bench):
    script = """
import time
ask()
for number in range(6000):
    open(f"file{number}", "w").close()
time.sleep(30)
"""
    end = await bench.run(script, disk_bytes=1 << 20)
    assert end.disk_full


async def test_processes_that_left_their_session_end_with_the_execution(bench):
    script = """
import subprocess
for _ in range(5):
    subprocess.Popen(["/usr/bin/setsid", "/bin/sh", "-c", "sleep 76.25 & sleep 76.25"])
ask()
"""
    end = await bench.run(script)
    assert (end.status, end.left_processes) == (0, 0), bench.log()
    assert not any(b"76.25" in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())


async def test_memory_is_limited_for_an_execution_as_a_whole_where_control_groups_can_be_made(bench):
    if not bench.isolation.has_control_groups:
        pytest.skip("no control groups here")
    script = """
import time
ask()
for _ in range(4):
    if not os.fork():
        held = bytearray(60 << 20); time.sleep(5); os._exit(0)
time.sleep(1)
"""
    end = await bench.run(script, memory_bytes=160 << 20)
    assert end.out_of_memory
    assert not list(Path("/sys/fs/cgroup").glob("**/opengyre/one-*"))
