"""Which drafted tokens stand: one file per rule, `registry` for their names, `reference` for reading."""
