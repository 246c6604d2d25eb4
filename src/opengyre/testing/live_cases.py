"""The harnesses that are checked live, with the tools that each of them offers."""

from opengyre.core.types import Role
from opengyre.testing.live_harness import LiveCase
from opengyre.testing.scripted_model import Part

_ALL_ROLES = (Role.MAIN, Role.MAIN_SUMMARY, Role.SUB_AGENT)
_SHELL = Part(shell=("shell", '{"command" :  {command}}'), growths=0)

OPENAI_AGENTS = """
import subprocess, sys
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)

@function_tool
def shell(command: str) -> str:
    "Run a command."
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout

model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
agent = Agent(name="main", instructions="You are an agent.", tools=[shell], model=model)
print(Runner.run_sync(agent, sys.argv[1]).final_output)
"""
PYDANTIC_AI = """
import subprocess, sys
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
agent = Agent(OpenAIChatModel("policy"), instructions="You are an agent.")

@agent.tool_plain
def shell(command: str) -> str:
    "Run a command."
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout

print(agent.run_sync(sys.argv[1]).output)
"""

CASES = (
    LiveCase(
        name="mini-swe-agent",
        context_tokens=200_000,
        part=Part(
            shell=("bash", '{"command" :  {command}}'),
            growths=0,
            final_command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        ),
    ),
    LiveCase(
        name="openai-agents",
        install="pip:openai-agents==0.24.0",
        command=("{install}/bin/python", "-c", OPENAI_AGENTS, "{instruction}"),
        context_tokens=200_000,
        part=_SHELL,
    ),
    LiveCase(
        name="pydantic-ai",
        install="pip:pydantic-ai==2.62.0",
        command=("{install}/bin/python", "-c", PYDANTIC_AI, "{instruction}"),
        context_tokens=200_000,
        part=_SHELL,
    ),
    LiveCase(
        name="qwen-code",
        context_tokens=400_000,
        part=Part(
            shell=("run_shell_command", '{"is_background":false,  "description": "run", "command" : {command}}'),
            spawn=("agent", '{"subagent_type": "general-purpose", "prompt" : {prompt}, "description":"list files"}'),
        ),
        roles=_ALL_ROLES,
    ),
    LiveCase(
        name="codex",
        context_tokens=90_000,
        part=Part(
            shell=("exec_command", '{"yield_time_ms": 1000, "cmd" : {command}}'),
            spawn=("spawn_agent", '{"message" : {prompt}}'),
            wait=("wait_agent", '{"timeout_ms": 30000, "targets" : [{agent}]}'),
            agent_pattern=r'"agent_id":"([^"]+)"',
        ),
        roles=_ALL_ROLES,
    ),
    LiveCase(
        name="opencode",
        context_tokens=90_000,
        part=Part(
            shell=("bash", '{"description": "run",  "command" : {command}}'),
            growth="seq 100000 100700",
            spawn=("task", '{"subagent_type": "general", "prompt" : {prompt}, "description":"list files"}'),
        ),
        roles=(*_ALL_ROLES, Role.AUXILIARY),
    ),
    LiveCase(
        name="pi",
        context_tokens=60_000,
        part=Part(shell=("bash", '{"command" :  {command}}'), growths=3),
        more=("MAINTASK: and once more.",),
        roles=(Role.MAIN, Role.MAIN_SUMMARY),
    ),
    LiveCase(
        name="claude-code",
        context_tokens=200_000,
        part=Part(
            shell=("Bash", '{"description": "run",  "command" : {command}}'),
            spawn=(
                "Agent",
                '{"subagent_type": "general-purpose", "prompt" : {prompt}, "description":"list files", '
                '"run_in_background": false}',
            ),
            summary_asks="detailed summary of the conversation",
        ),
        roles=_ALL_ROLES,
    ),
)
OPENAI_SDK = """
import subprocess, sys
from openai import OpenAI
client, history = OpenAI(), [{"role": "user", "content": sys.argv[1]}]
tools = [{"type": "function", "function": {"name": "shell", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}}}}]
while True:
    message = client.chat.completions.create(model="policy", messages=history, tools=tools).choices[0].message
    history.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        command = __import__("json").loads(call.function.arguments)["command"]
        out = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        history.append({"role": "tool", "tool_call_id": call.id, "content": out})
"""
ANTHROPIC_SDK = """
import subprocess, sys
from anthropic import Anthropic
client, history = Anthropic(), [{"role": "user", "content": sys.argv[1]}]
tools = [{"name": "shell", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}]
while True:
    with client.messages.stream(model="policy", max_tokens=8000, messages=history, tools=tools) as stream:
        message = stream.get_final_message()
    history.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    if not calls:
        break
    history.append({"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": call.id, "content": subprocess.run(
            call.input["command"], shell=True, capture_output=True, text=True).stdout} for call in calls]})
"""
SDKS = (
    LiveCase(
        name="openai-sdk",
        install="pip:openai==3.63.0",
        command=("{install}/bin/python", "-c", OPENAI_SDK, "{instruction}"),
        context_tokens=200_000,
        part=_SHELL,
    ),
    LiveCase(
        name="anthropic-sdk",
        install="pip:anthropic==2.17.0",
        command=("{install}/bin/python", "-c", ANTHROPIC_SDK, "{instruction}"),
        context_tokens=200_000,
        part=_SHELL,
    ),
)
PARKED = (*(case for case in CASES if case.name in ("qwen-code", "codex", "claude-code")), *SDKS)
"""Clients that have to survive an answer that takes longer than ten minutes, with their own timeouts at default."""
