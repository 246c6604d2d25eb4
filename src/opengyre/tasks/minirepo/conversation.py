"""The words of the reference harness on minirepo tasks: prompts, tools, results, limits.

The demonstrations speak these words; a test holds them against what the harness really sends.
"""

from opengyre.core.chat import Tool

MAIN_SYSTEM = "lead: build every module, then finish"
SUB_SYSTEM = "coder: write one module, test it, then finish"
SUB_ORDER = "write this module"
"""Ends a coder's first message: what stands right before a reply tells the two agents apart."""
COMPACTION = "context full: summarise progress"
BAD_CALL = "bad call"
LEFT = "left"
"""Before the names of the modules that nobody has written yet."""
STATUS_WORDS = ("pass", "fail", "untested", "stopped")
MAIN_REPLY_TOKENS = 12
SUB_REPLY_TOKENS = 160
SUMMARY_TOKENS = 16
MAIN_ROOM_TOKENS = 28
"""Growth of the main context, in tokens, that makes the harness compact."""
MAX_CALLS = 20
MAX_MAIN_TURNS = 10
MAX_SUB_TURNS = 6
MAX_MALFORMED = 12
"""Choice: high. An execution that ends early is short, and a short one weighs more a token: with 4 the tokens that good
and bad executions share were pushed down on balance."""


def _tool(name: str, *parameters: str) -> Tool:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    return Tool(name=name, schema={"type": "object", "properties": properties, "required": list(parameters)})


MAIN_TOOLS = (_tool("delegate", "module"), _tool("finish", "result"))
SUB_TOOLS = (
    _tool("write_file", "content"),
    _tool("append_file", "content"),
    _tool("run_tests"),
    _tool("finish", "result"),
)
SENTENCES = (MAIN_SYSTEM, SUB_SYSTEM, SUB_ORDER, COMPACTION)
"""What the harness says again and again: one token each, so that contexts stay short."""
WORDS = (
    "delegate",
    "finish",
    "write_file",
    "append_file",
    "run_tests",
    "saved",
    "passed",
    "failed",
    "built",
    "left",
    "done",
    *STATUS_WORDS,
)
"""Tool and status words that are one token each."""
