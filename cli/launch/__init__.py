"""Launchers: how a role's process comes to life and ends."""
