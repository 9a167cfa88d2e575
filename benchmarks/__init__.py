"""Measurements: paired, in one run, raw results committed."""

from workers.logs import mute_imports

mute_imports()
