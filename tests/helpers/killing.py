"""A process that is killed before one of its changes to local files, by the number of that change."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["KilledError", "killed_at"]

_CHANGES = ("replace", "link", "unlink", "remove", "rmdir", "mkdir")


class KilledError(BaseException):
    """The process is killed here. What it would do afterwards, in a `finally` too, is not done."""


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> bool:
    """Do work until its change number `step`, counted from 0; whether it had so many.

    Parameters
    ----------
    step
        The change before which the work ends. No later one is made.
    monkeypatch
        Puts what counts in the place of the system's calls.
    work
        What is done.
    """
    left = step

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left <= 0:
                left = -1
                raise KilledError
            left -= 1
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for name in _CHANGES:
            patched.setattr(os, name, counted(getattr(os, name)))
        with contextlib.suppress(KilledError):
            work()
    return left < 0
