"""Environments in message space. Importing this registers the built-in ids with gymnasium, by name: their modules load
when made.
"""

from palestra.envs.registry import register_builtin

register_builtin("palestra/Calculator-v0", "palestra.envs.calculator:Calculator")
