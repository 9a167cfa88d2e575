"""Forwards whose rows do not depend on what else is in the batch, bit for bit (`batch_invariant`).

`operations` says what a forward may be made of, `native` has the operations of a CPU, `on_gpu` a GPU's.
"""
