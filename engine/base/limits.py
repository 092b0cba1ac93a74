"""Limits and defaults that several rooms share."""

MAX_DRAFTS = 8  # drafts of one sequence in one step
EXPERT_READS = 3  # default bound on reads in flight, of experts and of layers each
