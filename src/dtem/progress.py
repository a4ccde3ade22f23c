"""Progress on stderr, for anything that may take more than two seconds."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(
    total: int | None, description: str = "", unit: str = "img", *, show: bool = True
) -> Iterator[Callable[[int], object]]:
    """A bar: at once on a terminal, elsewhere a line every ten seconds once it takes more than two.

    Yields the function to call with the number of items that have been done since the last call.
    """
    from tqdm import tqdm

    interval, delay = (0.1, 0.0) if sys.stderr.isatty() else (10.0, 2.0)
    with tqdm(
        total=total,
        desc=description or None,
        unit=unit,
        file=sys.stderr,
        leave=False,
        mininterval=interval,
        delay=delay,
        disable=not show,
    ) as bar:
        yield bar.update
