"""Drafters with weights of their own: the modules, and the checkpoint formats that they are published in."""
