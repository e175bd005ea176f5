"""A URL, its options and the environment → a client of obstore, and what its failures mean."""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from serai.errors import (
    NotFoundInStorage,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageTransient,
    StorageUnreachable,
)
from serai.storage._scrub import is_secret_name, scrub
from serai.storage.keys import check_key

__all__ = ["Location", "failure", "parse_location", "status_of"]

_COMMON = {"endpoint", "anonymous", "deadline", "timeout"}
_OPTIONS = {
    "s3": _COMMON | {"region", "path_style", "bulk_delete"},
    "az": _COMMON | {"account"},
    "gs": _COMMON,
}
_KEYS_FROM = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the machine's role",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, "
    "or the machine's identity",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the machine's service account",
}
_SERVICE = {"s3": "S3", "az": "Azure Blob Storage", "gs": "Google Cloud Storage"}


@dataclass(frozen=True)
class Location:
    """Where a root lies. Times in seconds. ``secrets`` are only kept to blank them in texts."""

    scheme: Literal["s3", "az", "gs"]
    bucket: str
    prefix: str
    options: Mapping[str, str] = field(default_factory=dict)
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    deadline: float = 120.0
    timeout: float = 60.0

    @property
    def url(self) -> str:
        """Opens the same root again; holds no secret."""
        path = quote(self.prefix)
        query = f"?{urlencode(sorted(self.options.items()), safe=':/')}" if self.options else ""
        return f"{self.scheme}://{self.bucket}{'/' + path if path else ''}{query}"

    @property
    def endpoint(self) -> str:
        """Who is asked, for people."""
        given = self.options.get("endpoint")
        if not given and self.scheme == "s3":
            given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return given or _SERVICE[self.scheme]

    def client(self, *, retries: int) -> Any:
        """A store of obstore that repeats a failed request ``retries`` times by itself."""
        from obstore import store as stores
        from obstore.exceptions import BaseError

        endpoint = self.options.get("endpoint")
        common: dict[str, Any] = {
            "prefix": self.prefix or None,
            "client_options": {
                "timeout": timedelta(seconds=self.timeout),
                "connect_timeout": timedelta(seconds=min(5.0, self.timeout)),
                "allow_http": self.endpoint.startswith("http://"),
                "user_agent": "serai",
            },
            "retry_config": {
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=self.deadline),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=10),
                },
            },
        }
        config: dict[str, Any] = dict(self.credentials)
        if self._flag("anonymous"):
            config["skip_signature"] = True
        try:
            if self.scheme == "s3":
                config = {**_aws_profile(), **config}
                if endpoint:
                    config["endpoint"] = endpoint
                config["virtual_hosted_style_request"] = not self._flag("path_style", "://" in self.endpoint)
                if region := self.options.get("region"):
                    config["region"] = region
                if not self._flag("bulk_delete", True):
                    config["disable_bulk_delete"] = True
                return stores.S3Store(self.bucket, **common, **config)
            if self.scheme == "az":
                if endpoint:
                    config["endpoint"] = endpoint
                if account := self.options.get("account"):
                    config["account_name"] = account
                return stores.AzureStore(self.bucket, **common, **config)
            if endpoint:
                config["base_url"] = endpoint
            return stores.GCSStore(self.bucket, **common, **config)
        except (BaseError, ValueError, OSError) as error:
            raise StorageDenied(
                f"cannot set up {_SERVICE[self.scheme]} for {self.bucket}: "
                f"{scrub(_first_line(error), self.credentials.values())}",
                where=self.url,
                expected=f"credentials from {_KEYS_FROM[self.scheme]}",
                next_step="serai explain S302",
            ) from None

    def _flag(self, name: str, default: bool = False) -> bool:
        value = self.options.get(name)
        return default if value is None else value.lower() in ("1", "true", "yes")


def parse_location(url: str, **options: Any) -> Location:
    """Read ``scheme://bucket/prefix?option=value``; ``options`` win over the query.

    ``credentials`` may be among ``options``: a mapping of obstore's own names. A URL never holds one,
    because URLs end in job files, logs and process lists.
    """
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if scheme not in _OPTIONS:
        raise ValueError(f"{scheme} is no object store")
    credentials = {name: str(value) for name, value in dict(options.pop("credentials", None) or {}).items()}
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    given.update({name: _text(value) for name, value in options.items() if value is not None})
    clean = f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    endpoint = urlsplit(given.get("endpoint", ""))
    if "@" in parts.netloc or endpoint.username or any(map(is_secret_name, given)):
        raise StorageError(
            "a storage URL must not hold credentials: it ends in job files, logs and process lists",
            code="S310",
            where=clean,
            expected=f"credentials from {_KEYS_FROM[scheme]}",
            next_step="take them out of the URL, and make new ones if it was shared",
        )
    known = _OPTIONS[scheme]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise StorageError(
                f"{scheme}:// has no option {name!r}" + (f"; perhaps you meant {near[0]!r}" if near else ""),
                code="S310",
                where=clean,
                expected=f"one of {', '.join(sorted(known))}",
                next_step="serai explain S310",
            )
    if not parts.netloc:
        raise StorageError(
            f"{url!r} names no bucket",
            code="S309",
            where=clean,
            expected=f"{scheme}://bucket/prefix",
            next_step=f"{scheme}://BUCKET{parts.path}",
        )
    prefix = unquote(parts.path).strip("/")
    if prefix:
        check_key(prefix)
    if given.get("endpoint") and endpoint.scheme not in ("http", "https"):
        raise StorageError(
            f"the endpoint {given['endpoint']!r} is no http:// or https:// address",
            code="S310",
            where=clean,
            expected="endpoint=https://host:port",
            next_step=f"endpoint=https://{given['endpoint']}",
        )
    times = {}
    for name in ("deadline", "timeout"):
        if name in given:
            times[name] = _seconds(name, given[name], clean)
    return Location(
        scheme=scheme,  # type: ignore[arg-type]  # one of _OPTIONS, checked above
        bucket=parts.netloc,
        prefix=prefix,
        options=given,
        credentials=credentials,
        **times,
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _seconds(name: str, text: str, where: str) -> float:
    try:
        seconds = float(text)
        if seconds > 0:
            return seconds
    except ValueError:
        pass
    raise StorageError(
        f"{name}={text!r} is no time", code="S310", where=where, expected=f"seconds above 0, as in {name}=60"
    )


def _aws_profile() -> dict[str, str]:
    """Keys and region of the profile that AWS's own tools would use; the environment's own keys win."""
    profile = os.environ.get("AWS_PROFILE") or "default"
    home = Path.home() / ".aws"
    found: dict[str, str] = {}
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
    }
    files = (
        (
            os.environ.get("AWS_CONFIG_FILE") or home / "config",
            {"default": "default"}.get(profile, f"profile {profile}"),
        ),
        (os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials", profile),
    )
    for path, section in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(path)
        except configparser.Error:
            continue
        if parser.has_section(section):
            found.update({names[k]: v for k, v in parser.items(section) if k in names})
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        found = {name: value for name, value in found.items() if name == "region"}
    if os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        found.pop("region", None)
    return found


# What obstore's errors say is only in their text (0.12): the status line, the body, the cause.
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>|\"code\": ?\"?(\w{1,80})")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})")
_CAUSE = re.compile(r"(?:message|error): \"([^\"]{1,200})\"")
_REPEATABLE = {408, 429, 500, 502, 503, 504}
_REPEATABLE_CODES = {"RequestTimeout", "OperationAborted", "ConditionalRequestConflict", "SlowDown"}
_NETWORK = re.compile(r"HTTP error|HttpError|error sending request|reqwest|hyper|timed out|kind: Timeout")
_FULL_CODES = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "AccountStorageQuotaExceeded"}
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified (?:bucket|container) does not exist")


def status_of(error: BaseException) -> int | None:
    """The HTTP status that the store answered with, if it answered."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def failure(
    error: BaseException, location: Location, key: str, action: str, *, answered: bool
) -> StorageError:
    """What an error of obstore means in serai's terms, without any secret in it.

    ``answered``: the store has answered before, so that credentials did exist.
    """
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = str(error)
    status = status_of(error)
    code = next((first or second for first, second in _CODE.findall(text)), "")
    reason = scrub(_reason(text, status, code), location.credentials.values())
    where = f"{key or '(listing)'} in {location.url}"
    if _NO_BUCKET.search(text):
        return StorageError(
            f"there is no bucket {location.bucket!r} at {location.endpoint}",
            code="S309",
            where=location.url,
            expected="a bucket that exists: serai never makes one",
            next_step=f"make it with your store's own tool, or correct {location.bucket!r}",
        )
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        kind: type[StorageError] = StorageTransient if answered else StorageDenied
        return kind(
            f"found no credentials for {location.endpoint}",
            where=location.url,
            expected=_KEYS_FROM[location.scheme],
            next_step="set them in the environment of every node, or add ?anonymous=true for a public bucket",
        )
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or status in (401, 403):
        if code in _FULL_CODES:
            return _full(location, action, key, where, reason)
        return StorageDenied(
            f"{location.endpoint} does not allow to {action} {key or 'this prefix'}: {reason}",
            where=where,
            expected=f"credentials with get, put, list and delete, from {_KEYS_FROM[location.scheme]}",
            next_step="serai explain S302",
        )
    if status == 507 or code in _FULL_CODES:
        return _full(location, action, key, where, reason)
    if isinstance(error, FileNotFoundError) or status == 404:
        return NotFoundInStorage(f"there is no {key} to {action}", where=where, next_step="serai ckpt ls")
    if status == 416 or "StartTooLarge" in text:
        return StorageError(
            f"{key} ends before the range that was asked for",
            code="S307",
            where=where,
            expected="a range inside the object",
            next_step="serai ckpt verify: the object was cut short",
        )
    if status is None and _NETWORK.search(text):
        return StorageUnreachable(
            f"{location.endpoint} does not answer: {reason}",
            where=where,
            expected="an answer within the time-out",
            next_step="check the endpoint, the network and HTTPS_PROXY, then run again",
        )
    kind = StorageTransient if status in _REPEATABLE or code in _REPEATABLE_CODES else StorageError
    return kind(
        f"{location.endpoint} could not {action} {key or 'this prefix'}: {reason}",
        where=where,
        expected="success",
        next_step=f"serai explain {kind.default_code}",
    )


def _full(location: Location, action: str, key: str, where: str, reason: str) -> StorageFull:
    return StorageFull(
        f"{location.endpoint} has no room to {action} {key}: {reason}",
        where=where,
        expected="free space or quota in the bucket",
        next_step="free space, raise the quota, or keep fewer checkpoints",
    )


def _reason(text: str, status: int | None, code: str) -> str:
    if status is not None:
        message = _MESSAGE.search(text)
        words = [f"HTTP {status}", code, message[1].strip().splitlines()[0] if message else ""]
        return " ".join(word for word in words if word)
    cause = _CAUSE.search(text)
    if cause:
        return cause[1]
    if "TimedOut" in text or "kind: Timeout" in text:
        return "timed out"
    return text.splitlines()[0][:300] if text else "no reason given"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
