"""OpenGyre: elastic online reinforcement learning of long-running agents in black-box harnesses."""

__version__ = "0.1.0"
