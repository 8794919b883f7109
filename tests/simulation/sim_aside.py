"""Work that runs next to the rest of a history in pieces: it stops where it pauses, until the history lets it continue.

Each piece of work has its own thread, and only one thread runs at any time. So the product's code runs unchanged, and a
history can be repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from sim_stores import DiedError

from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder

__all__ = ["PausableWork", "Trap", "die", "pause", "set_trap", "list_trap_patches"]

_HERE = threading.local()
# Methods that change a folder.
_CHANGES = ("create", "put", "put_file", "remove", "duplicate_to")


class PausableWork:
    """Work that can pause.

    Parameters
    ----------
    work
        Function to run.
    is_alive
        Whether its process is alive; if not, the work ends at its next pause.
    """

    def __init__(self, work: Callable[[], object], is_alive: Callable[[], bool] = lambda: True) -> None:
        self._work = work
        self._is_alive = is_alive
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._killed = False
        self._error: BaseException | None = None
        self.is_over = False

    def advance(self) -> None:
        """Run until the next pause or the end; raises the work's errors, except `DiedError`."""
        if not self.is_over:
            self._advance_thread()

    def _advance_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="simulated aside", daemon=True)
            self._thread.start()
        self._killed |= not self._is_alive()
        self._turn.release()
        self._back.acquire()
        if self.is_over:
            self._thread.join()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def end(self) -> None:
        """Run to the end."""
        while not self.is_over:
            self.advance()

    def kill(self) -> None:
        """Let the process die where the work is."""
        self._killed = True
        if self._thread is None:
            self.is_over = True
        self.end()

    def _run(self) -> None:
        self._turn.acquire()
        _HERE.activity = self
        try:
            if not self._killed:
                self._work()
        except DiedError:
            pass
        except BaseException as error:
            self._error = error
        self.is_over = True
        self._back.release()

    def _pause(self) -> None:
        if not self._killed:
            self._back.release()
            self._turn.acquire()
        if self._killed:
            raise DiedError


def pause() -> bool:
    """Pause the work that calls this; returns False if the caller cannot pause."""
    activity: PausableWork | None = getattr(_HERE, "activity", None)
    if activity is None:
        return False
    activity._pause()
    return True


def die() -> NoReturn:
    """Let the calling process die: its remaining work is not done either."""
    activity: PausableWork | None = getattr(_HERE, "activity", None)
    if activity is not None:
        activity._killed = True
    raise DiedError


class Trap:
    """A disturbance at one of the next changes to files.

    Parameters
    ----------
    at
        Number of the change, from 0; negative for no disturbance.
    action
        Kind of disturbance: ``"dies"``, ``"fails"``, or ``"waits"``.
    meanwhile
        Called instead of a pause if the work cannot pause.
    """

    def __init__(self, at: int, action: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        self._at = at
        self._action = action
        self._meanwhile = meanwhile

    def hit(self) -> None:
        """Count a change that is about to be made, and cause the disturbance if its turn has come."""
        self._at -= 1
        if self._at != -1:
            return
        if self._action == "dies":
            die()
        if self._action == "fails":
            raise StorageError("fails on purpose")
        if not pause():
            self._meanwhile()


@contextmanager
def set_trap(trap: Trap) -> Iterator[None]:
    """Apply a trap to the changes to files that this thread makes."""
    before = getattr(_HERE, "trap", None)
    _HERE.trap = trap
    try:
        yield
    finally:
        _HERE.trap = before


def list_trap_patches() -> list[tuple[Any, str, Any]]:
    """Replacements of a folder's methods while a history runs."""
    return [(Folder, name, _add_trap(getattr(Folder, name))) for name in _CHANGES]


def _add_trap(real: Callable[..., Any]) -> Callable[..., Any]:
    def change_folder(self: Folder, *args: Any, **kwargs: Any) -> Any:
        trap: Trap | None = getattr(_HERE, "trap", None)
        if trap is None:
            return real(self, *args, **kwargs)
        trap.hit()
        return real(self, *args, **kwargs)

    return change_folder
