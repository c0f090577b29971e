"""The environment host: plays environments of this machine for clients elsewhere, each in a process of its own."""
