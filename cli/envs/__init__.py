"""The verbs of `palestra env`: one module each."""
