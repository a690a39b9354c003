"""Environments: multi-turn episodes that reward the policy, and adapters for environments of other packages.

In: data rows, seeds and the policy's turns. Out: states, messages and rewards. A worker process runs them, with a time
limit; nothing here imports torch.
Begin with `protocol.Environment`; `runner` has the processes, `adapters` wrap environments of other packages.
"""

from fppo.environments.protocol import Begin, Environment, Message, Reply, State, Step
from fppo.environments.runner import EnvironmentRunner, Player

__all__ = ["Begin", "Environment", "EnvironmentRunner", "Message", "Player", "Reply", "State", "Step"]
