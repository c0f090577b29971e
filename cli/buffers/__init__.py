"""The verbs of `palestra buffer`."""
