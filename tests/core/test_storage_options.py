"""Misspelt storage options and unknown kinds of backends are refused when the job is planned."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from spark_state_ext.backends.registry import Backend, refuse_unusable
from spark_state_ext.backends.storage_options import refuse_misspelt
from spark_state_ext.errors import UsageError


class Store(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that accepts any option and passes it on, as many do."""

    def __init__(self, region: str = "", **more: Any) -> None:
        super().__init__(**more)


class Closed(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that accepts only the options that it names."""

    def __init__(self, region: str = "") -> None:
        super().__init__()


STORE, CLOSED = f"{__name__}.Store", f"{__name__}.Closed"

MISSPELT: list[tuple[str, Any, str]] = [
    ("s3://b/x", {"secert": "1"}, "'s3://b/x' has the option 'secert', which S3FileSystem does not take; most likely 'secret' is meant. It takes anon, asy"),
    ("s3://b/x", {"key": "k", "access_token": "1"}, "has the option 'access_token', which S3FileSystem does not take. It takes"),
    ("s3://b/x", {"anno": True}, "most likely 'anon' is meant"),
    ("s3://b/x", {"client_kwargs": {"endpont_url": "http://localhost:1"}},
     "storage_options['client_kwargs'] of the root 's3://b/x' has the option 'endpont_url', which S3FileSystem does not take; most likely 'endpoint_url' is"),
    ("s3://b/x", {"config_kwargs": {"max_pool_connection": 5}}, "most likely 'max_pool_connections' is meant"),
    ("abfs://c/x", {"acount_name": "a"}, "most likely 'account_name' is meant"),
    ("file:///tmp/x", {"auto_mkdirs": True}, "most likely 'auto_mkdir' is meant"),
    ("/tmp/x", {"use_listing_cache": True}, "most likely 'use_listings_cache' is meant"),
    ("memory://x", {"skip_instance_cach": True}, "most likely 'skip_instance_cache' is meant"),
    ("x://y/z", {"implementation": STORE, "regoin": "eu"}, "has the option 'regoin', which Store does not take; most likely 'region'"),
    ("x://y/z", {"implementation": CLOSED, "anything": 1}, "has the option 'anything', which Closed does not take. It takes region"),
    ("s3://b/x", {1: 2}, "has the option 1, which S3FileSystem does not take"),
]  # fmt: skip

ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("s3://b/x", {"key": "k", "secret": "s", "token": "t", "anon": False, "endpoint_url": "http://localhost:1"}),
    ("s3://b/x", {"client_kwargs": {"region_name": "eu", "verify": False}, "config_kwargs": {"retries": {}}}),
    ("s3://b/x", {"profile": "p", "s3_additional_kwargs": {"ServerSideEncryption": "AES256"}, "batch_size": 8}),
    ("s3://b/x", {"use_listings_cache": False, "skip_instance_cache": True, "asynchronous": False, "loop": None}),
    ("s3://b/x", {"session": object(), "whatever": 1}),
    ("abfs://c/x", {"account_name": "a", "exclude_managed_identity_credential": True}),
    ("/tmp/x", {"auto_mkdir": True, "anon": True, "listings_expiry_time": 1, "max_paths": 2}),
    ("memory://x", {"global_store": True}),
    ("webhdfs://h/x", {"user": "u", "kerberos": True, "proxies": {}}),
    ("http://h/x", {"headers": {}, "ssl": False, "auth": ("u", "p")}),
    ("x://y/z", {"implementation": STORE, "region": "eu", "anything": 1}),
    ("simplecache::s3://b/x", {"s3": {"secert": "1"}, "simplecache": {"cache_storage": "/tmp/c"}}),
    ("nonsense://b/x", {"whatever": 1}),
    ("x://y/z", {"implementation": "no.such.Class", "whatever": 1}),
]


@pytest.mark.parametrize(("root", "options", "text"), MISSPELT, ids=[f"{m[0]} {m[1]}" for m in MISSPELT])
def test_a_misspelt_option_is_refused(root: str, options: dict[str, Any], text: str) -> None:
    """Without this check, the options reach the executors, or have no effect."""
    with pytest.raises(UsageError, match=re.escape(text)):
        refuse_misspelt(root, options)


@pytest.mark.parametrize(("root", "options"), ACCEPTED, ids=[f"{root} {sorted(options)}" for root, options in ACCEPTED])
def test_an_option_that_may_be_valid_is_accepted(root: str, options: dict[str, Any]) -> None:
    refuse_misspelt(root, options)


def test_options_of_other_backends_are_checked_too() -> None:
    with pytest.raises(UsageError, match="root 's3://b/x' has the option 'secert'"):
        refuse_unusable("/tmp/x", {}, [Backend("/tmp/x"), Backend("s3://b/x", storage_options={"secert": "1"})])


def test_an_unknown_kind_of_backend_is_refused() -> None:
    """Without this check, it reaches the executors, and the first batch fails with an ExecutorPackageError."""
    known = "Known kinds are fsspec, sqlite"
    for kind, text in (
        ("sqlitee", f"most likely 'sqlite' is meant. {known}"),
        ("tape", f"which no package here provides. {known}"),
    ):
        with pytest.raises(UsageError, match=re.escape(text)) as raised:
            refuse_unusable("/tmp/x", {}, [Backend(name="other", kind=kind)])
        assert f"the backend 'other' is of the kind {kind!r}" in str(raised.value)
    refuse_unusable("/tmp/x", {}, [Backend(name="other", kind="sqlite")])
