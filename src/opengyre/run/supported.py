"""What a configuration may say and this version does not carry out: refused in one line, never ignored."""

from opengyre.core.config import Config
from opengyre.core.errors import ConfigError
from opengyre.run.emulated import emulated_costs

ANY = None
"""Whatever the configuration says."""


def check_supported(config: Config) -> None:
    """Refuse settings that a live run cannot carry out yet.

    Raises:
        ConfigError: The first such setting, with what works instead.
    """
    emulated_costs(config)
    wanted: tuple[tuple[str, object, tuple[object, ...] | None], ...] = (
        ("policy.path", config.policy.path, ("",)),
        ("cells.launcher", config.cells.launcher, ("local",)),
        ("cells.device", config.cells.device, ("cpu",)),
        ("cells.dtype", config.cells.dtype, ("float32",)),
        ("cells.options", config.cells.options, ({},) if config.cells.engine == "reference" else ANY),
        ("tasks.source", config.tasks.source, ANY if config.cells.engine == "reference" else ("minirepo",)),
        ("harness.name", config.harness.name, ANY if config.cells.engine == "reference" else ("gyre-agent",)),
        ("train.packing", config.train.packing, ("rows",)),
        ("train.options", config.train.options, ({},)),
        ("run.checkpoint_every", config.run.checkpoint_every, (1,)),
        ("sandbox.kind", config.sandbox.kind, ("auto", "bubblewrap", "landlock", "none")),
    )
    for key, seen, expected in wanted:
        if expected is not None and seen not in expected:
            choices = " or ".join(repr(value) for value in expected)
            raise ConfigError(f"{key} = {seen!r}: this version carries out {choices} only")
