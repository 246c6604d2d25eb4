"""Command line of the reference harness."""

import argparse
import sys

from gyre_agent.agent import run


def main() -> int:
    """Run the agent on a workspace."""
    parser = argparse.ArgumentParser(prog="gyre_agent", description="A small coding agent.")
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--workspace", default=".")
    parser.add_argument("--max-calls", type=int, default=20)
    arguments = parser.parse_args()
    return run(base_url=arguments.base_url, workspace=arguments.workspace, settings={"max_calls": arguments.max_calls})


if __name__ == "__main__":
    sys.exit(main())
