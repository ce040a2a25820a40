"""Meshtune's sampler as a package of OptunaHub: grey-box Thompson sampling over parallelism configurations."""

from tuner import ThompsonSampler, load_study, make_sampler

__all__ = ["ThompsonSampler", "load_study", "make_sampler"]
