"""Searches of Zhou et al., BayesNAS (ICML 2019): priors on scores, and group lasso on weights, by evidence."""
