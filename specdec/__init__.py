"""Exact speculative decoding as a library: the engine, without Ray."""

__version__ = "0.1.0"
