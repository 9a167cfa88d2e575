"""A discrete-event simulation of a cluster: the real policy code under a virtual clock."""
