"""The durable queue of groups between the rollouts and the trainer."""
