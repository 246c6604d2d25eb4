"""The errors of OpenGyre.

    GyreError
    |-- InputError            the user gave something wrong: exit code 2, one line
    |   |-- ConfigError       a key of the configuration
    |   `-- FileError         a file that is not what it says (file, line, expected)
    |-- ExecutionError        ends one execution and never the run: it becomes an outcome
    |   |-- SandboxError      the sandbox could not be set up
    |   |-- HarnessError      the harness did not start, or broke its contract
    |   `-- EvaluationError   the evaluator failed; the candidate may be innocent
    |-- CallError             one call cannot be answered: an HTTP status for the harness
    |   `-- ContextOverflowError  its prompt alone does not fit the policy
    |-- CellLostError         a cell went away in the middle of something
    |-- RunError              the run cannot go on (disk full, no cell left): exit code 1
    `-- InvariantError        a rule of the design is broken: stops the run with the values

An ``ExecutionError`` is data. Everything below ``RunError`` and ``InvariantError`` stops the run. A message
carries the value that was seen and the value that was expected.
"""


class GyreError(Exception):
    """Root of all errors that OpenGyre raises on purpose."""


class InputError(GyreError):
    """What the user gave is wrong; the message is the one line that is shown."""


class ConfigError(InputError):
    """A key of the configuration is unknown, of the wrong type, or out of range."""


class FileError(InputError):
    """A file is not what it says: the message names the file, the line and what was expected."""


class ExecutionError(GyreError):
    """Ends one execution; the driver turns it into an outcome."""


class SandboxError(ExecutionError):
    """The sandbox of an execution could not be set up."""


class HarnessError(ExecutionError):
    """The harness did not start or did not keep its contract."""


class EvaluationError(ExecutionError):
    """The evaluation could not be carried out; it is retried and never counted as reward 0."""


class CallError(GyreError):
    """One call cannot be answered.

    Args:
        message: What is wrong, for the harness to read.
        status: HTTP status to answer with.
        code: Machine-readable reason, for example ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ContextOverflowError(CallError):
    """The prompt alone does not fit the policy; every dialect has its own words for it.

    Args:
        prompt_tokens: What the request needs.
        limit_tokens: What the policy has.
    """

    def __init__(self, prompt_tokens: int, limit_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit_tokens} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens.",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class CellLostError(GyreError):
    """A cell's process or machine went away."""


class RunError(GyreError):
    """The run cannot go on; its state is saved."""


class InvariantError(GyreError):
    """A rule that must always hold does not; carries the values seen and expected."""
