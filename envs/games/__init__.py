"""Text games of several turns. Each is an environment of its own; `base.py` is what they share."""
