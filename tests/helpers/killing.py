"""Simulate a process that is killed before one of its changes to local files, chosen by number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["KilledError", "killed_at"]

_CHANGES = ("replace", "link", "unlink", "remove", "rmdir", "mkdir")


class KilledError(BaseException):
    """Raised where the process is killed. Later changes, even in a `finally`, are not made."""


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> bool:
    """Do work until its change number `step`, counted from 0, and return whether it had that many changes.

    Parameters
    ----------
    step
        The change before which the work ends. Later changes are not made either.
    monkeypatch
        Replaces the system calls by functions that count.
    work
        The work.
    """
    remaining = step

    def count_calls(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal remaining
            if remaining <= 0:
                remaining = -1
                raise KilledError
            remaining -= 1
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for name in _CHANGES:
            patched.setattr(os, name, count_calls(getattr(os, name)))
        with contextlib.suppress(KilledError):
            work()
    return remaining < 0
