"""The log of sessions and turns: what a run keeps of its rollouts."""
