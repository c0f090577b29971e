"""Environments in message space. Importing this registers the built-in ids with gymnasium, by name: their modules load
when made.
"""

from palestra.envs.registry import register_builtin

BUILTINS = {
    "palestra/Calculator-v0": "palestra.envs.calculator:Calculator",
    "palestra/Code-v0": "palestra.envs.code.env:CodeEnv",
    "palestra/HumanEval-v0": "palestra.envs.code.humaneval:HumanEval",
    "palestra/Search-v0": "palestra.envs.search.env:Search",
    "palestra/Math-v0": "palestra.envs.maths:MathEnv",
    "palestra/ReasoningGym-v0": "palestra.envs.reasoning:ReasoningGym",
    "palestra/FunctionCalling-v0": "palestra.envs.functions.env:FunctionCalling",
    "palestra/GuessTheNumber-v0": "palestra.envs.games.guess:GuessTheNumber",
    "palestra/Mastermind-v0": "palestra.envs.games.mastermind:Mastermind",
    "palestra/Hangman-v0": "palestra.envs.games.hangman:Hangman",
    "palestra/ServiceDesk-v0": "palestra.envs.dialogue.servicedesk:ServiceDesk",
    "palestra/Negotiation-v0": "palestra.envs.dialogue.negotiation:Negotiation",
    "palestra/OpenEnv-v0": "palestra.envs.adapters.openenv:OpenEnv",
    "palestra/Gem-v0": "palestra.envs.adapters.gem:Gem",
}
"""By id: the module and class."""

for _env_id, _entry_point in BUILTINS.items():
    register_builtin(_env_id, _entry_point)
