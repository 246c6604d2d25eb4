"""Harness files: what they say, what is refused, and that a started harness finds what it was promised."""

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from opengyre.core.config import decode_config
from opengyre.core.errors import ConfigError
from opengyre.core.types import Task
from opengyre.execute.harness import harness_plan, load_harness, shipped_harnesses
from opengyre.execute.isolation import choose_isolation
from opengyre.execute.launcher import ForkServer
from opengyre.execute.live import LiveRunner

NAMES = {"claude-code", "codex", "command", "gyre-agent", "mini-swe-agent", "opencode", "pi", "qwen-code"}
PYTHON = getattr(sys, "_base_executable", sys.executable)
TASK = Task(task_id="t", format="repo", instruction="build {this}\n'now'", files={"TASK.md": "x"})


def plan_of(name, install="", **options):
    if install:
        options["install"] = install
    return harness_plan(decode_config({"harness": {"name": name, "options": options}}))


def test_every_promised_harness_is_shipped():
    assert set(shipped_harnesses()) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES - {"gyre-agent", "command"}))
def test_a_plan_leaves_only_what_the_execution_fills_in(name, tmp_path):
    plan = plan_of(name, install=str(tmp_path))
    text = "\n".join([*plan.command, *plan.environment.values(), *plan.files.values()])
    for left in ("{install}", "{context_tokens}", "{output_tokens}", "{compaction_tokens}", "{command}"):
        assert left not in text
    assert plan.command[0].startswith(str(tmp_path))
    assert "{instruction}" in plan.command
    assert str(tmp_path) in plan.shown


def test_files_of_harnesses_are_what_they_say(tmp_path):
    for name in NAMES:
        for path in load_harness(name).files:
            assert not Path(path).is_absolute()
            assert ".." not in Path(path).parts
            if path.endswith(".json"):
                plan = plan_of(name, install=str(tmp_path))
                json.loads(plan.files[path].replace("{base_url}", "http://x/v1"))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"name": "nobody"}, "harness.name = 'nobody': expected one of claude-code"),
        ({"name": "codex"}, "harness.options.install = ''"),
        ({"name": "codex", "options": {"speed": 1}}, "harness.options.speed: no such key"),
        ({"name": "command"}, "harness.options.command = None: expected a list of texts"),
        ({"name": "command", "options": {"command": []}}, "expected a list of texts"),
    ],
)
def test_a_harness_that_cannot_be_started_is_refused_by_key(table, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.").replace("[", r"\[")):
        harness_plan(decode_config({"harness": table}))


async def started(script, *, day="", pin_date=False, files=None):
    """Run a command harness and return what it wrote to ``seen.json``."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-h"))
    folder.chmod(0o755)
    server = ForkServer(folder / "log")
    await server.start()
    try:
        plan = plan_of("command", command=[PYTHON, "-I", "-S", "-c", script, "{instruction}", "{origin}"])
        object.__setattr__(plan, "pin_date", pin_date)
        object.__setattr__(plan, "files", files or {})
        config = decode_config({"harness": {"timeout_s": 20.0, "overall_timeout_s": 60.0}})
        runner = LiveRunner(config, folder / "x", server, plan, isolation=choose_isolation("auto"), day=day)
        end = await asyncio.wait_for(runner.run("one", TASK, folder / "s"), 30)
        assert end.status == 0, (folder / "x" / "one" / "harness.log").read_text()
        return json.loads((folder / "x" / "one" / "workspace" / "seen.json").read_text())
    finally:
        await server.stop()
        shutil.rmtree(folder)


SEEN = """
import json, os, sys, time
home = os.environ["HOME"]
paths = {name: os.path.join(home, name) for name in ("a.txt", ".b/c.txt")}
files = {name: open(path).read() for name, path in paths.items() if os.path.exists(path)}
json.dump({"argv": sys.argv[1:], "files": files, "cwd": os.getcwd(), "home": home, "day": time.strftime("%Y-%m-%d"),
           "lang": os.environ["LANG"], "zone": os.environ["TZ"], "base": os.environ["OPENAI_BASE_URL"],
           "anthropic": os.environ["ANTHROPIC_BASE_URL"]}, open("seen.json", "w"))
"""


async def test_a_command_finds_its_instruction_its_files_and_the_same_surroundings_every_time():
    files = {"a.txt": "at {base_url}", ".b/c.txt": "plain"}
    first, second = await started(SEEN, files=files), await started(SEEN, files=files)
    assert first["argv"][0] == TASK.instruction
    assert first["base"] == first["argv"][1] + "/v1"
    assert first["anthropic"] == first["argv"][1]
    assert first["files"] == {"a.txt": f"at {first['base']}", ".b/c.txt": "plain"}
    for key in ("cwd", "home", "lang", "zone", "day"):
        assert first[key] == second[key]


@pytest.mark.skipif(
    not list(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), reason="libfaketime is not installed"
)
async def test_a_pinned_date_is_shown_to_the_harness():
    assert (await started(SEEN, day="2025-03-04", pin_date=True))["day"] == "2025-03-04"
