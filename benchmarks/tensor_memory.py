"""How much memory the tensors of this process take."""

from __future__ import annotations

import gc

import torch


def live_tensor_bytes() -> int:
    """Return the bytes of all tensors that Python knows of, what they share counted once.

    What only C++ holds (packed weights of compiled forwards) is not among them.
    """
    gc.collect()
    storages: dict[int, int] = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type == "cpu":
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
