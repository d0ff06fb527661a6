"""Upload an export to a model hub with `huggingface_hub`."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import UserError


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Create the repository if needed and upload the folder in one commit.

    Uses the hub at `HF_ENDPOINT` (huggingface.co by default) and the account of `HF_TOKEN` or `hf auth login`.

    Returns:
        The address of the commit.

    Raises:
        UserError: The hub refuses the upload or cannot be reached. The folder is unchanged.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            folder_path=str(folder), repo_id=repository, commit_message="Upload by neuclip export"
        )
    except Exception as error:  # the client raises many exception types
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise UserError(
            f"{repository} could not be uploaded ({type(error).__name__}: {first}). The export is in {folder}; once "
            f"the account may write there (hf auth login, or HF_TOKEN), `hf upload {repository} {folder}` does it."
        ) from error
    return str(commit.commit_url)
