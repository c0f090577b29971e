"""The ways in which a worker plays: groups, as a plan says; or a function that makes all rollouts by itself."""
