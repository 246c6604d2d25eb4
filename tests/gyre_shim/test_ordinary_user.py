"""The fork server as an ordinary user: the same sandboxes, made through a user namespace or by Landlock."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PYTHON = "/usr/bin/python3"
NOBODY = 65534
pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not Path(PYTHON).exists() or not shutil.which("setpriv"),
    reason="needs root, setpriv and the system's Python, to become somebody else",
)
HARNESS = """
import json, os
def tried(action):
    try: return repr(action())
    except BaseException as error: return type(error).__name__
json.dump({"user": os.getuid(), "host": tried(lambda: open("/etc/hostname").read()),
           "kill": tried(lambda: os.kill(%d, 0)), "own": tried(lambda: open("mine", "w").write("x"))},
          open("seen.json", "w"))
"""


@pytest.fixture
def place():
    folder = Path(tempfile.mkdtemp(prefix="gyre-u"))
    shutil.copytree(SOURCE / "gyre_shim", folder / "source" / "gyre_shim")
    for name in ("gyre_agent", "gyre_grade"):
        shutil.copytree(SOURCE / name, folder / "source" / name)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def served(place: Path, order: dict) -> dict:
    """Give a fork server that runs as nobody one order and return what it says of its end."""
    words = [
        "setpriv",
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
        PYTHON,
        "-m",
        "gyre_shim.forkserver",
    ]
    server = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(place / "source"), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    said = [json.loads(server.stdout.readline()) for _ in range(3)]
    server.stdin.close()
    server.wait(10)
    server.stdout.close()
    return said[-1]


def common(place: Path, kind: str) -> dict:
    limits = {"memory_bytes": 1 << 29, "processes": 32, "disk_bytes": 1 << 24, "user": NOBODY}
    return {"id": "one", "sandbox": kind, "control_group": False, "workdir": "", "log": str(place / "log"), **limits}


def owned(folder: Path) -> Path:
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    return folder


@pytest.mark.parametrize("kind", ["namespaces", "landlock"])
def test_an_execution_of_an_ordinary_user_is_confined_and_can_work(place, kind):
    folder = owned(place / "x")
    workspace = owned(folder / "workspace")
    owned(folder / "root")
    order = {
        **common(place, kind),
        "kind": "execution",
        "folder": str(folder),
        "workspace": str(workspace),
        "socket": str(place / "nobody"),
        "module": "",
        "command": [PYTHON, "-I", "-S", "-c", HARNESS % os.getpid()],
        **{"environment": {}, "files": {}, "settings": {}, "instruction": "", "day": "", "shown": []},
        **{"timeout_s": 20.0, "overall_timeout_s": 40.0, "hold_s": 20.0},
    }
    assert served(place, order)["ended"] == 0
    end = json.loads((folder / "exit.json").read_text())
    assert end["status"] == 0, (place / "log").read_text()
    seen = json.loads((workspace / "seen.json").read_text())
    assert seen["own"] == "1"
    assert seen["user"] == NOBODY
    assert seen["kill"] in ("ProcessLookupError", "PermissionError")
    assert seen["host"] in ("FileNotFoundError", "PermissionError")


@pytest.mark.parametrize("kind", ["namespaces", "landlock"])
def test_a_scoring_of_an_ordinary_user_counts_function_by_function(place, kind):
    workspace = owned(place / "work")
    (workspace / "amber.py").write_text("def one(v):\n    return v + 1\n\ndef two(v):\n    return v\n")
    scratch = owned(place / "scratch")
    hidden = (
        "from amber import *\n\ndef test_one():\n    assert one(1) == 2\n\ndef test_two():\n    assert two(1) == 2\n"
    )
    order = {
        **common(place, kind),
        **{"kind": "grading", "grader": "functions", "test_files": ["hidden_amber.py"], "limit_s": 10.0},
        "hidden_files": {"hidden_amber.py": hidden},
        "workspace": str(workspace),
        "scratch": str(scratch),
        "result": str(scratch / "result.json"),
    }
    assert served(place, order)["ended"] == 0, (place / "log").read_text()
    tests = json.loads((scratch / "result.json").read_text())["tests"]
    assert tests == {"amber::one": "passed", "amber::two": "failed"}
    assert [path.name for path in scratch.iterdir()] == ["result.json"]


@pytest.mark.parametrize("kind", ["namespaces", "landlock"])
@pytest.mark.parametrize("user", [0, NOBODY])
def test_a_trial_finds_that_nothing_gets_out(place, kind, user):
    words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", PYTHON, "-m", "gyre_shim.trial", kind]
    ended = subprocess.run(
        words, capture_output=True, text=True, env={"PYTHONPATH": str(place / "source"), "PATH": "/usr/bin:/bin"}
    )
    assert json.loads(ended.stdout)["works"], ended.stdout


def test_what_is_installed_below_the_temporary_folder_is_shown_in_a_sandbox(place):
    tool = owned(place / "tool")
    (tool / "said.txt").write_text("here")
    folder = owned(place / "x")
    workspace = owned(folder / "workspace")
    owned(folder / "root")
    order = {
        **common(place, "namespaces"),
        "kind": "execution",
        "folder": str(folder),
        "workspace": str(workspace),
        "socket": str(place / "nobody"),
        "module": "",
        "command": ["/bin/sh", "-c", f"cp {tool}/said.txt seen.txt; touch {tool}/new 2>/dev/null; touch /tmp/own"],
        **{"environment": {}, "files": {}, "settings": {}, "instruction": "", "day": "", "shown": [str(tool)]},
        **{"timeout_s": 20.0, "overall_timeout_s": 40.0, "hold_s": 20.0},
    }
    assert served(place, order)["ended"] == 0
    assert json.loads((folder / "exit.json").read_text())["status"] == 0, (place / "log").read_text()
    assert (workspace / "seen.txt").read_text() == "here"
    assert not (tool / "new").exists()
