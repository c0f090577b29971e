"""How users program what is played: a `RolloutPlan` in a class, or `generate_rollout` in a function. Both run in the worker."""
