"""`push_to_hub`: an adapter as a repository of the Hugging Face Hub."""

import tempfile
from pathlib import Path
from typing import Any

from dtem.adapters.card import CARD
from dtem.adapters.locate import HUB_ID, hub_errors
from dtem.adapters.storage import save_pretrained
from dtem.errors import DtemError
from dtem.files import write_file
from dtem.handle import Handle


def push_to_hub(
    handle: Handle,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    card: str | None = None,
    **options: Any,
) -> str:
    """Upload the adapter to the Hugging Face Hub, as `save_pretrained` writes it to a folder.

    Returns the address of the repository.

    Args:
        handle: of the patched model.
        repo_id: ``owner/name``; the repository is created if it does not exist.
        private: create it as a private one.
        revision: branch to upload to, created if it does not exist.
        token: default: the one that ``hf auth login`` stored.
        card: text of README.md; default: the card of `save_pretrained`.
        options: what `save_pretrained` takes: ``trained_r``, ``base_model``, ``license``, ``datasets``, ``metrics``, …

    Examples:
        >>> handle = dtem.from_pretrained("my.safetensors", model)
        >>> dtem.push_to_hub(handle, "you/name", license="apache-2.0")
    """
    import huggingface_hub

    if not HUB_ID.fullmatch(repo_id):
        raise DtemError(f"{repo_id!r} is not a Hub id; write owner/name")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, repo_id)
        save_pretrained(handle, folder, name=repo_id, **options)
        if card is not None:
            write_file(folder / CARD, card)
        with hub_errors(repo_id):
            api = huggingface_hub.HfApi(token=token)
            url = api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, commit_message="Upload adapter")
    return str(url)
