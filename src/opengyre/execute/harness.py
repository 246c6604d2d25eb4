"""A harness is data: how it is started and how it marks its requests, one TOML file each."""

import shutil
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from opengyre.core.config import Config
from opengyre.core.errors import ConfigError
from opengyre.execute.live import HarnessPlan
from opengyre.trajectory.marks import RoleMarks

_OUTPUT_SHARE = 8
"""A harness that must be told how much a reply may be long is told this part of the context."""
_COMPACTION_SHARE = 0.8
"""And one that must be told when to compact, this share."""
_OPTIONS = {"install", "command", "environment"}


class HarnessSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a harness file says. ``{...}`` in texts stands for what only an execution knows; see ``placeholders``.

    Example: ``HarnessSpec(dialect="chat", command=("my-agent", "--url", "{base_url}"))``.
    """

    dialect: Literal["chat", "responses", "anthropic"]
    """What it speaks; the proxy tells by the path."""
    module: str = ""
    """Python module with ``run(base_url, workspace, settings)``, called in the forked process."""
    command: tuple[str, ...] = ()
    """Command to execute."""
    install: str = ""
    """Where it comes from: ``npm:PACKAGE@VERSION`` or ``pip:PACKAGE==VERSION``."""
    environment: dict[str, str] = {}
    files: dict[str, str] = {}
    """Files to write below the home folder before the start: path to text."""
    settings: dict[str, Any] = {}
    """Arguments of a module's ``run``."""
    pin_date: bool = False
    """Its prompts hold today's date: show it the day on which the run began, where libfaketime is installed."""
    roles: RoleMarks = RoleMarks()

    def __post_init__(self) -> None:
        """Refuse a harness that cannot be started, or in two ways."""
        if bool(self.module) == bool(self.command):
            raise ValueError("expected either module or command")


def shipped_harnesses() -> tuple[str, ...]:
    """Return the names of the harnesses that are shipped.

    >>> "claude-code" in shipped_harnesses()
    True
    """
    folder = resources.files("opengyre.execute") / "harnesses"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_harness(name: str) -> HarnessSpec:
    """Return a shipped harness.

    Raises:
        ConfigError: There is none of that name, or its file is wrong.

    >>> load_harness("gyre-agent").module
    'gyre_agent.agent'
    """
    if name not in shipped_harnesses():
        raise ConfigError(f"harness.name = {name!r}: expected one of {', '.join(shipped_harnesses())}")
    text = (resources.files("opengyre.execute") / "harnesses" / f"{name}.toml").read_text()
    try:
        return msgspec.convert(tomllib.loads(text), HarnessSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"harness {name}: {error}") from error


def placeholders(context_tokens: int, install: str) -> dict[str, str]:
    """Return what stands for itself before an execution is there; the shim adds base_url, origin and instruction.

    >>> placeholders(1000, "/opt/h")["{compaction_tokens}"]
    '800'
    """
    return {
        "{context_tokens}": str(context_tokens),
        "{output_tokens}": str(max(1, context_tokens // _OUTPUT_SHARE)),
        "{compaction_tokens}": str(int(_COMPACTION_SHARE * context_tokens)),
        "{install}": install,
    }


def filled(text: str, values: dict[str, str]) -> str:
    """Return a text with its placeholders replaced.

    >>> filled("{install}/bin/pi", {"{install}": "/opt/pi"})
    '/opt/pi/bin/pi'
    """
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def harness_plan(config: Config) -> HarnessPlan:
    """Return how the configured harness is started.

    Raises:
        ConfigError: No harness of that name is shipped, its options are wrong, or its program is not there.
    """
    spec, options = load_harness(config.harness.name), config.harness.options
    if spec.module:
        settings = {**spec.settings, "max_calls": config.harness.max_calls, **options}
        return HarnessPlan(module=spec.module, command=(), environment=spec.environment, settings=settings)
    unknown = set(options) - _OPTIONS
    if unknown:
        raise ConfigError(f"harness.options.{min(unknown)}: no such key; expected {', '.join(sorted(_OPTIONS))}")
    install = str(options.get("install", ""))
    if spec.install and not (install and Path(install).is_dir()):
        raise ConfigError(
            f"harness.options.install = {install!r}: expected the folder in which {config.harness.name} is installed "
            f"({spec.install})"
        )
    values = placeholders(config.policy.context_tokens, install)
    command = _command(options, spec)
    environment = {**spec.environment, **options.get("environment", {})}
    return HarnessPlan(
        module="",
        command=tuple(filled(part, values) for part in command),
        environment={key: filled(str(value), values) for key, value in environment.items()},
        settings={},
        files={path: filled(text, values) for path, text in spec.files.items()},
        shown=tuple(sorted({place for place in (install, *_runtime(spec)) if place})),
        pin_date=spec.pin_date,
    )


def _command(options: dict[str, Any], spec: HarnessSpec) -> tuple[str, ...]:
    """Return the command of the file, or the one that the options give to ``command``."""
    given = options.get("command")
    if spec.command != ("{command}",):
        if given is not None:
            raise ConfigError("harness.options.command: expected only with harness.name = 'command'")
        return spec.command
    if not isinstance(given, list) or not given or not all(isinstance(part, str) for part in given):
        raise ConfigError(f"harness.options.command = {given!r}: expected a list of texts, the command to start")
    return tuple(given)


def _runtime(spec: HarnessSpec) -> list[str]:
    """Return the folder of the Node runtime that an npm harness needs, where it is not the system's."""
    node = shutil.which("node") if spec.install.startswith("npm:") else None
    if node is None or Path(node).resolve().is_relative_to("/usr"):
        return []
    return [str(Path(node).resolve().parent.parent)]
