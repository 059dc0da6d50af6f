"""Models by hub id, ``org/name`` or ``org/name@revision``, through huggingface_hub and its cache.

Only what a model is loaded from is downloaded. A copy in the cache serves where the
hub cannot be reached or ``HF_HUB_OFFLINE`` is set.
"""

import errno
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from model_worker.models.download_log import DownloadLog
from model_worker.models.files import CONFIG, WEIGHTS, WEIGHTS_INDEX, weight_names
from prefixcache.errors import ConfigError, NotFound, PrefixCacheError

logger = logging.getLogger(__name__)

SMALL_FILES = (
    CONFIG,
    WEIGHTS_INDEX,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
CODE_FILES = ("*.py",)
LOG_EVERY_S = 10.0
CANNOT_STORE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
DISK_FULL_TEXT = "No space left on device"


@dataclass(frozen=True, slots=True)
class HubId:
    """A model on the hub; revision: a branch, a tag or a commit, None for the main branch."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        """As a user writes it."""
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def fetch(repo: str, revision: str | None, *, with_code: bool, log_every_s: float = LOG_EVERY_S) -> Path:
    """The folder of ``repo``'s snapshot in the hub's cache, downloaded now as far as it is absent.

    ``revision`` None is the main branch; ``with_code`` takes the repository's Python files
    too. Raises NotFound for what the hub or, offline, the cache does not have, ConfigError
    for what keeps it from being had.
    """
    model = HubId(repo, revision)
    try:
        return _download(model, DownloadLog(str(model), every_s=log_every_s), with_code=with_code)
    except PrefixCacheError:
        raise
    except Exception as error:
        raise _explained(model, error) from error


def _download(model: HubId, log: DownloadLog, *, with_code: bool) -> Path:
    """Small files first: the index among them names the weight files."""
    options: dict[str, Any] = {"tqdm_class": log.bar_class(), "local_files_only": constants.HF_HUB_OFFLINE}
    small = [*SMALL_FILES, *(CODE_FILES if with_code else ())]
    folder = Path(snapshot_download(model.repo, revision=model.revision, allow_patterns=small, **options))
    weights = weight_names(folder) or [WEIGHTS]
    if _absent(folder, weights):
        snapshot_download(model.repo, revision=folder.name, allow_patterns=weights, **options)
    log.end()
    absent = _absent(folder, [CONFIG, *weights])
    if absent:
        raise ConfigError(
            f"model {str(model)!r} from {constants.ENDPOINT} has no {absent[0]} in {folder}; serve a model that has "
            f"safetensors weights, or download one of its .gguf files and name that"
        )
    return folder


def _absent(folder: Path, names: list[str]) -> list[str]:
    return [name for name in names if not (folder / name).is_file()]


def _explained(model: HubId, error: Exception) -> PrefixCacheError:
    hub = constants.ENDPOINT
    match error:
        case GatedRepoError():
            return ConfigError(
                f"model {model.repo!r} is gated: accept its terms at {hub}/{model.repo}, then set HF_TOKEN to a token "
                f"of that account"
            )
        case RepositoryNotFoundError() | HFValidationError():
            return NotFound(
                f"no model {model.repo!r}: neither a local folder nor, for this account, on {hub}; check how it is "
                f"spelled, or set HF_TOKEN where it is private"
            )
        case RevisionNotFoundError():
            return NotFound(
                f"model {model.repo!r} on {hub} has no revision {model.revision!r}; name a branch, a tag or a commit"
            )
        case LocalEntryNotFoundError():
            return _out_of_reach(model, error)
        case HfHubHTTPError():
            return ConfigError(f"{hub} refuses model {str(model)!r}: {_first_line(error)}; try again later")
    if _is_about_storing(error):
        return ConfigError(
            f"cannot store model {str(model)!r} in {constants.HF_HUB_CACHE}: {_first_line(error)}; free space there, "
            f"or set HF_HOME to a folder with space that can be written"
        )
    return ConfigError(
        f"cannot download model {str(model)!r} from {hub}: {type(error).__name__}: {_first_line(error)}; start again, "
        f"what is complete is kept"
    )


def _out_of_reach(model: HubId, error: LocalEntryNotFoundError) -> PrefixCacheError:
    where = f"whole in {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        return NotFound(
            f"model {str(model)!r} is not {where} and HF_HUB_OFFLINE is set; unset it, download the model first where "
            f"there is a network (hf download {model.repo}), or name a local folder"
        )
    cause = error.__cause__ or error
    return ConfigError(
        f"cannot reach {constants.ENDPOINT} for model {str(model)!r} ({type(cause).__name__}: {_first_line(cause)}), "
        f"and it is not {where}; check the network and HF_ENDPOINT, or name a local folder"
    )


def _is_about_storing(error: Exception) -> bool:
    return (isinstance(error, OSError) and error.errno in CANNOT_STORE) or DISK_FULL_TEXT in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
