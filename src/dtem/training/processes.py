"""Rank and number of processes, as `accelerate launch` or torchrun started them."""

import os
from typing import Any

from dtem.errors import require


class Processes:
    """Rank of this process and number of all of them; 0 of 1 where nothing else was started."""

    def __init__(self, cpu: bool = False) -> None:
        self.rank, self.world = 0, 1
        self._state: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return
        self._state = require("accelerate", "train").PartialState(cpu=cpu)
        self.rank, self.world = self._state.process_index, self._state.num_processes

    @property
    def device(self) -> Any:
        """The GPU of this process; "cuda" where it is the only one."""
        return "cuda" if self._state is None else self._state.device

    def wait(self) -> None:
        """Wait for all processes."""
        if self._state is not None:
            self._state.wait_for_everyone()
