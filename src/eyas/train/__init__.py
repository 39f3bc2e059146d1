"""A drafter from a data set of hidden states: packs, training-time test, loop, resume."""
