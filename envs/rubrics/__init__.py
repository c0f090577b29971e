"""Rubrics: named components that turn an episode into one reward and a record of how it came about.

A `Scoring` goes in, a `Reward` comes out; see docs/envs/rubrics.md. Judges by a model are in `judge`, graders that may hang in
`processes`.
"""

from palestra.envs.rubrics.rubric import Rubric
from palestra.envs.rubrics.types import Score, Scoring

__all__ = ["Rubric", "Score", "Scoring"]
