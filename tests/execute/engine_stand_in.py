"""A container engine for tests: ``engine.py info|image|create|cp|run|inspect|exec|rm|build``, one host folder as image.

Real in what matters to the shim: the container has a network namespace of its own, its mounts are where they were
asked to be (bind mounts in a mount namespace), ``exec`` runs in both, ``rm -f`` ends everything. State lies beside
this file.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(__file__).parent / "state"
IMAGE = Path(__file__).parent / "image"


def option(words: list[str], name: str) -> list[str]:
    return [words[place + 1] for place, word in enumerate(words) if word == name]


def run(words: list[str]) -> int:
    name, workdir = option(words, "--name")[0], option(words, "-w")[0]
    assert option(words, "--network") == ["none"]
    binds = [mount.split(":") for mount in option(words, "-v")]
    script = "ip link set lo up 2>/dev/null || ifconfig lo up 2>/dev/null || true\n"
    script += "".join(f"mkdir -p {target} && mount --bind {source} {target} && " for source, target in binds)
    script += f"touch {STATE}/{name}.ready && exec sleep 1000"
    process = subprocess.Popen(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", script],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    for _ in range(200):
        if (STATE / f"{name}.ready").exists():
            break
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    told = {"outer": process.pid, "pid": int(children[0]), "workdir": workdir, "words": words}
    (STATE / f"{name}.json").write_text(json.dumps(told))
    sys.stdout.write("0123456789ab\n")
    return 0


def execute(words: list[str]) -> int:
    place = 0
    variables, workdir = {}, ""
    while words[place].startswith("-"):
        if words[place] == "-i":
            place += 1
            continue
        if words[place] == "-e":
            key, _, value = words[place + 1].partition("=")
            variables[key] = value
        else:
            workdir = words[place + 1]
        place += 2
    told = json.loads((STATE / f"{words[place]}.json").read_text())
    start = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', workdir or told["workdir"]]
    command = ["nsenter", "-t", str(told["pid"]), "-n", "-m", "-p", *start]
    os.execvpe(command[0], [*command, *words[place + 1 :]], {"PATH": os.environ["PATH"], **variables})
    return 127


def image(words: list[str]) -> int:
    return 0 if words[2] == "known:1" else 1


def pull(words: list[str]) -> int:
    sys.stderr.write(f"Error: {words[1]}: manifest unknown\n")
    return 1


def copy(words: list[str]) -> int:
    return subprocess.run(["cp", "-r", f"{IMAGE}/.", words[2]]).returncode


def inspect(words: list[str]) -> int:
    sys.stdout.write(f"{json.loads((STATE / f'{words[-1]}.json').read_text())['pid']}\n")
    return 0


def remove(words: list[str]) -> int:
    path = STATE / f"{words[-1]}.json"
    if path.exists():
        os.kill(json.loads(path.read_text())["outer"], signal.SIGKILL)
        path.rename(path.with_suffix(".gone"))
    return 0


VERBS = {
    "info": lambda _: 0,
    "create": lambda _: sys.stdout.write("made\n") * 0,
    "image": image,
    "pull": pull,
    "cp": copy,
    "run": run,
    "inspect": inspect,
    "exec": lambda words: execute(words[1:]),
    "rm": remove,
}


def main(words: list[str]) -> int:
    STATE.mkdir(exist_ok=True)
    return VERBS[words[0]](words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
