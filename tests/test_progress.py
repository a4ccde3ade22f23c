"""The progress bar on stderr."""

import sys

import pytest

from dtem.progress import progress_bar


@pytest.mark.parametrize("terminal", [True, False])
def test_a_short_run_shows_its_bar_on_terminals_only(terminal: bool, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with progress_bar(6) as advance:
        advance(4)
    printed = capsys.readouterr()
    assert ("0/6" in printed.err) == terminal
    assert printed.out == ""


def test_without_a_total_and_switched_off(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress_bar(None):
        pass
    assert "0img" in capsys.readouterr().err
    with progress_bar(6, show=False) as advance:
        advance(1)
    assert capsys.readouterr().err == ""
