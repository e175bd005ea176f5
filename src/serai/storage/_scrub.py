"""Takes secrets out of texts that people and logs will see."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

__all__ = ["SECRET_VARIABLES", "is_secret_name", "scrub"]

SECRET_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)

_SECRET_NAME = re.compile(r"key|secret|token|password|passwd|signature|credential|^sig$", re.IGNORECASE)
_QUERY = re.compile(r"(?P<name>[?&;](?:amp;)?[\w.%-]+)=(?P<value>[^&\s\"'<>)]*)")
_USER = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_HEADER = re.compile(
    r"(?P<name>authorization|x-amz-security-token)(?P<gap>[\"']?\s*:\s*)[^\n]*", re.IGNORECASE
)
_SHORTEST = 6  # a shorter "secret" would blank half of every sentence


def is_secret_name(name: str) -> bool:
    """Whether an option or query field of that name holds a secret."""
    return bool(_SECRET_NAME.search(name))


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` without the given secrets, those in the environment, and any that a URL carries."""
    known = {*secrets, *(os.environ.get(name, "") for name in SECRET_VARIABLES)}
    for secret in sorted(known, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, "***")
    text = _USER.sub(r"\g<scheme>***@", text)
    text = _HEADER.sub(r"\g<name>\g<gap>***", text)
    return _QUERY.sub(lambda m: f"{m['name']}=***" if is_secret_name(m["name"][1:]) else m[0], text)
