"""Environments in which a policy writes code: generated tasks, HumanEval, and tasks of one's own. Code runs in the sandbox alone."""
