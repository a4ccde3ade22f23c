"""Which of several processes this one is, as `accelerate launch` or torchrun started them."""

import os
from typing import Any

from dtem.types import DtemError


class Processes:
    """This process among all of them; alone where nothing else was started."""

    def __init__(self, cpu: bool = False) -> None:
        self.rank, self.world = 0, 1
        self._state: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return
        try:
            from accelerate import PartialState
        except ImportError as error:
            raise DtemError('several processes need the package accelerate: pip install "dtem[train]"') from error
        self._state = PartialState(cpu=cpu)
        self.rank, self.world = self._state.process_index, self._state.num_processes

    @property
    def device(self) -> Any:
        """The GPU that is this process's own; "cuda" where it is alone."""
        return "cuda" if self._state is None else self._state.device

    def wait(self) -> None:
        """Until all are here."""
        if self._state is not None:
            self._state.wait_for_everyone()
