"""Everything that runs on the operator's machine, and the agent that runs on the target."""
