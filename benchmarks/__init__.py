"""Measurements: paired, in one run, raw results committed."""
