"""Upload an export to the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.utils import HFValidationError, RepositoryNotFoundError, validate_repo_id

from fppo._errors import UsageError, words_of
from fppo.runtime.exports import CONTENTS

_TOKEN = re.compile(r"hf_\w{8,}")
# the files of weights that an earlier upload may have left, which a loader would take for this one's
_WEIGHTS = re.compile(
    r"(model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|adapter_model\.safetensors|adapter_config\.json)"
)


def check(name: str, hub: HfApi, *, public: bool = False) -> None:
    """Raise UsageError for a name that the hub does not accept, if nobody is logged in to the hub, and for a repository
    that is already public unless `public` is True."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"--push {name!r}: {error}") from None
    with _refused("there is no login; run hf auth login, or set HF_TOKEN"):
        owner = hub.whoami()["name"]
    with _refused("give another name"), suppress(RepositoryNotFoundError):
        _check_private(name if "/" in name else f"{owner}/{name}", hub, public)


def push(directory: Path, name: str, hub: HfApi, *, public: bool = False) -> str:
    """Upload the files of an export as a model repository, which is made private unless `public`, and return its
    address.

    Weights of an earlier upload that this export lacks are deleted there. Raises UsageError if the hub refuses, and for
    a repository that is public already without `public`.
    """
    with _refused(f"{directory} is written; give the command again to try again"):
        made = hub.create_repo(name, repo_type="model", private=not public, exist_ok=True)
        _check_private(made.repo_id, hub, public)
        own = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
        there = hub.list_repo_files(made.repo_id, repo_type="model")
        stale = sorted(file for file in there if _WEIGHTS.fullmatch(file) and file not in own)
        hub.upload_folder(
            repo_id=made.repo_id,
            repo_type="model",
            folder_path=directory,
            commit_message="Upload an export of fppo",
            ignore_patterns=[CONTENTS],
            delete_patterns=stale or None,
        )
        return str(made)


def _check_private(name: str, hub: HfApi, public: bool) -> None:
    if not public and not hub.repo_info(name, repo_type="model").private:
        raise UsageError(f"--push {name}: it is there and public; give --public to upload to it, or another name")


@contextmanager
def _refused(advice: str) -> Iterator[None]:
    """A context that turns errors of the hub into a UsageError with `advice`, from which access tokens are removed."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        text, token = words_of(error), huggingface_hub.get_token()
        text = text.replace(token, "[token]") if token else text
        raise UsageError(f"--push: the hub refuses: {_TOKEN.sub('[token]', text)}; {advice}") from None
