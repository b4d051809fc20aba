"""Input files behind URLs, through fsspec (the optional extra `remote`)."""

from __future__ import annotations

from typing import Any, BinaryIO, cast

from data_pipeline.errors import UserError
from data_pipeline.folder import is_url as is_url

_SCHEMES = ("http", "https", "s3", "gs")
_READ_AHEAD_BYTES = 4 << 20


def explain(error: BaseException) -> str:
    """One line: many errors of connections and codecs have no text of their own."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


def list_urls(url: str) -> list[tuple[str, int, str]]:
    """(URL, size in bytes or 0, a stamp that changes with the content) of a file, or of what a glob or folder holds.

    Raises:
        UserError: a kind of URL that cannot be read, or no answer.
    """
    files = _filesystem(url)
    try:
        if "*" in url:
            names = files.glob(url)
        elif not url.startswith("http") and files.isdir(url):
            names = files.find(url)
        else:
            names = [url]
        infos = [(files.unstrip_protocol(name), files.info(name)) for name in sorted(names)]
    except Exception as error:  # each protocol has exceptions of its own
        raise UserError(f"--input {url} cannot be read: {explain(error)}") from None
    return [(name, int(info.get("size") or 0), _stamp(info)) for name, info in infos if info.get("type") != "directory"]


def open_url(url: str) -> BinaryIO:
    """Open for reading from front to back.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        file = _filesystem(url).open(url, "rb", block_size=_READ_AHEAD_BYTES, cache_type="readahead")
    except OSError:
        raise
    except Exception as error:  # each protocol has exceptions of its own
        raise OSError(explain(error)) from None
    return cast(BinaryIO, file)


def _stamp(info: dict[str, Any]) -> str:
    return str(info.get("ETag") or info.get("etag") or info.get("LastModified") or info.get("mtime") or "")


def _filesystem(url: str) -> Any:
    scheme = url.partition("://")[0]
    if scheme not in _SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise UserError(f"--input {url} is not a URL that can be read (known: {known})")
    try:
        import fsspec

        return fsspec.filesystem(scheme)
    except ImportError as error:
        raise UserError(
            f"--input {url}: the package {error.name} is missing: pip install 'fastslow-scale[remote]'"
        ) from None
