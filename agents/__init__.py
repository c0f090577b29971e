"""Who plays: policies, the play loop, and groups of rollouts."""
