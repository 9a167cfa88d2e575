"""Draft workers and the coordinators that share them: serving, placement, what is believed of answers."""
