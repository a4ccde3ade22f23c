"""What all tests share. Importing this first makes jaxtyping check every shape that enters or leaves `dtem.ops`."""

import os
import random
import signal
from pathlib import Path

import jaxtyping
import pytest

jaxtyping.install_import_hook("dtem.ops", "beartype.beartype")

import torch  # noqa: E402 - the hook must stand before anything imports dtem

ROOT = Path(__file__).resolve().parent.parent

# Tiny tensors: more threads would only wait for each other, and round differently on every machine.
torch.set_num_threads(1)

# A shell starts background jobs with SIGINT ignored, and what they start inherits that: Ctrl-C is tested anyway.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, whichever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of photographs and weights that some tests need: $DTEM_DATA, else ../shared/data beside the repo."""
    named = os.environ.get("DTEM_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set DTEM_DATA to where it is")
    return folder
