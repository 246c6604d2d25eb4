"""A harness is data: how it is started and how it marks its requests, one TOML file each."""

import tomllib
from importlib import resources
from typing import Any, Literal

import msgspec

from opengyre.core.errors import ConfigError
from opengyre.trajectory.marks import RoleMarks


class HarnessSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a harness file says.

    Example: ``HarnessSpec(dialect="chat", command=("my-agent", "--url", "{base_url}"))``.
    """

    dialect: Literal["chat", "responses", "anthropic"]
    module: str = ""
    """Python module with ``run(base_url, workspace, settings)``, called in the forked process."""
    command: tuple[str, ...] = ()
    """Command to execute; ``{base_url}`` is replaced."""
    environment: dict[str, str] = {}
    """Environment variables; ``{base_url}`` is replaced."""
    settings: dict[str, Any] = {}
    """Arguments of a module's ``run``."""
    roles: RoleMarks = RoleMarks()

    def __post_init__(self) -> None:
        """Refuse a harness that cannot be started, or in two ways."""
        if bool(self.module) == bool(self.command):
            raise ValueError("expected either module or command")


def load_harness(name: str) -> HarnessSpec:
    """Return a shipped harness.

    Raises:
        ConfigError: There is none of that name, or its file is wrong.

    >>> load_harness("gyre-agent").module
    'gyre_agent.agent'
    """
    folder = resources.files("opengyre.execute") / "harnesses"
    shipped = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    if name not in shipped:
        raise ConfigError(f"harness.name = {name!r}: expected one of {', '.join(shipped)}")
    try:
        return msgspec.convert(tomllib.loads((folder / f"{name}.toml").read_text()), HarnessSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"harness {name}: {error}") from error
