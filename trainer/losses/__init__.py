"""Losses: pure functions of log p, each with its source. Weights are already normalised, so every loss is a plain weighted sum.

In: log p [B, S] and a micro-batch's arrays as tensors. Out: the loss, and sums for the metrics: names that begin with `max_` are combined
by taking the largest, all others by adding up. Positions of weight 0 give no gradient, whatever lies there.

`surrogates` is what of each token is raised, `kl` the estimates of a distance, `policy` puts them together with corrections, `own` finds a
loss of the user's.
"""

from palestra.trainer.losses.kl import ESTIMATES, k1, k2, k3
from palestra.trainer.losses.policy import PolicyLoss
from palestra.trainer.losses.supervised import nll_loss
from palestra.trainer.losses.surrogates import SURROGATES, Clip, Surrogate

__all__ = ["ESTIMATES", "SURROGATES", "Clip", "PolicyLoss", "Surrogate", "k1", "k2", "k3", "nll_loss"]
