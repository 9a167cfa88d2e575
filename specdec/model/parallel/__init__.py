"""Tensor parallelism: one model over several processes, as plain sharded tensors.

group             the ranks and what they say to each other
listening_store   where they meet
plan              which module is cut in which way, told from the configuration before weights are read
cuts              which part of which parameter a rank holds
surgery           a model on the meta device becomes one rank's part of it
loading           reads that part, and no more, from safetensors
"""
