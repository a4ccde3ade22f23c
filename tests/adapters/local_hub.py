"""A Hub in a folder: what `HfApi` and `snapshot_download` do there, and a list of what was asked of them."""

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest


class LocalApi:
    """Stands in for HfApi: a repository is a folder under `root`."""

    root: Path
    calls: list[tuple[str, Any]]

    def __init__(self, token: str | None = None) -> None:
        self.calls.append(("token", token))

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        self.calls.append(("private", private))
        return f"hub://{repo_id}"

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool) -> None:
        self.calls.append(("branch", (branch, exist_ok)))

    def upload_folder(self, *, repo_id: str, folder_path: str, revision: str | None, commit_message: str) -> None:
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        self.calls.append(("revision", revision))


def local_hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> type[LocalApi]:
    """Put it in the place of the Hub for one test; repositories are folders under `root`."""
    LocalApi.root, LocalApi.calls = root, []
    monkeypatch.setattr(huggingface_hub, "HfApi", LocalApi)

    def download(repo_id: str, revision: str | None = None, allow_patterns: list[str] | None = None) -> str:
        LocalApi.calls.append(("download", revision))
        return str(LocalApi.root / repo_id)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return LocalApi
