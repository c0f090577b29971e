"""Environments of other libraries and servers, played as Palestra's. Each module loads what it needs when an environment is made."""
