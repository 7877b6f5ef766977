"""Numbers leave a GPU without stopping it: a copy into pinned memory that is read when it is long there."""

from __future__ import annotations

import torch
from torch import Tensor


class Readout:
    """The values of `tensor` as they are when the current stream gets here."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record(torch.cuda.current_stream(tensor.device))
        else:
            self._values = tensor.clone()

    def values(self) -> list[float]:
        """Waits, without the interpreter lock, if they are still on their way. int64 stays exact."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.flatten().tolist()
