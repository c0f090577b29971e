"""The rollout service: gateway, renderer, recorder, engine client, plan of tasks, buffer."""
