"""Work that is done beside the rest of a history, a piece at a time: it stops where it pauses, until it is told to go on.

Each has a thread of its own, of which one runs at any time; so what runs is the product's code as it is, and a history
is the same again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from sim_stores import DiedError

from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder

__all__ = ["Aside", "Trap", "die", "pause", "trapped", "traps"]

_HERE = threading.local()
# What changes a folder.
_CHANGES = ("create", "put", "put_file", "remove", "duplicate_to")


class Aside:
    """One piece of work.

    Parameters
    ----------
    work
        What is done.
    lives
        Whether the process that does it lives; where it does not, the work ends at its next pause.
    """

    def __init__(self, work: Callable[[], object], lives: Callable[[], bool] = lambda: True) -> None:
        self._work = work
        self._lives = lives
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._killed = False
        self._error: BaseException | None = None
        self.over = False

    def go_on(self) -> None:
        """Until its next pause, or its end; raises what it raises, but for `DiedError`."""
        if not self.over:
            self._advance()

    def _advance(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="simulated aside", daemon=True)
            self._thread.start()
        self._killed |= not self._lives()
        self._turn.release()
        self._back.acquire()
        if self.over:
            self._thread.join()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def end(self) -> None:
        """To its end, whatever there is to do."""
        while not self.over:
            self.go_on()

    def kill(self) -> None:
        """It dies where it is."""
        self._killed = True
        if self._thread is None:
            self.over = True
        self.end()

    def _run(self) -> None:
        self._turn.acquire()
        _HERE.aside = self
        try:
            if not self._killed:
                self._work()
        except DiedError:
            pass
        except BaseException as error:
            self._error = error
        self.over = True
        self._back.release()

    def _pause(self) -> None:
        if not self._killed:
            self._back.release()
            self._turn.acquire()
        if self._killed:
            raise DiedError


def pause() -> bool:
    """The work that calls this stops here for a while; False where it is none that can."""
    aside: Aside | None = getattr(_HERE, "aside", None)
    if aside is None:
        return False
    aside._pause()
    return True


def die() -> NoReturn:
    """The process that does this dies: nothing that is left to do in it is done either."""
    aside: Aside | None = getattr(_HERE, "aside", None)
    if aside is not None:
        aside._killed = True
    raise DiedError


class Trap:
    """Which of the next changes to files is special, and how.

    Parameters
    ----------
    at
        Its number, from 0; negative: none is.
    happens
        What happens then: ``"dies"``, ``"fails"``, or ``"waits"``.
    waits
        What is done meanwhile where the work cannot pause.
    """

    def __init__(self, at: int, happens: str, waits: Callable[[], object] = lambda: None) -> None:
        self._at = at
        self._happens = happens
        self._waits = waits

    def hit(self) -> None:
        """A change is about to be made."""
        self._at -= 1
        if self._at != -1:
            return
        if self._happens == "dies":
            die()
        if self._happens == "fails":
            raise StorageError("fails on purpose")
        if not pause():
            self._waits()


@contextmanager
def trapped(trap: Trap) -> Iterator[None]:
    """The changes to files that this thread makes are such."""
    before = getattr(_HERE, "trap", None)
    _HERE.trap = trap
    try:
        yield
    finally:
        _HERE.trap = before


def traps() -> list[tuple[Any, str, Any]]:
    """What is put in the place of a folder's methods while a history runs."""
    return [(Folder, name, _with_traps(getattr(Folder, name))) for name in _CHANGES]


def _with_traps(real: Callable[..., Any]) -> Callable[..., Any]:
    def change(self: Folder, *args: Any, **kwargs: Any) -> Any:
        trap: Trap | None = getattr(_HERE, "trap", None)
        if trap is None:
            return real(self, *args, **kwargs)
        trap.hit()
        return real(self, *args, **kwargs)

    return change
