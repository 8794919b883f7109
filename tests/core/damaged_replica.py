"""A replica whose pages are damaged one after the other; run by test_standby_following_failures.

Usage: ``python damaged_replica.py FOLDER PAGE``. It damages the pages from PAGE on, runs a batch and a step of the follower
after each, and prints as JSON how many files the step read.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from standby_support import World, changes


def main(folder: Path, first: int) -> None:
    world = World(folder)
    for number in range(9):
        world.batch(changes(number))
    assert world.follower.step().is_caught_up
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    (path,) = world.follower.store_folder.glob("*/data.mdb")
    for page in range(first, path.stat().st_size // page_bytes):
        # A rebuilt replica may be smaller.
        if page < path.stat().st_size // page_bytes:
            with path.open("r+b") as file:
                file.seek(page * page_bytes)
                # LMDB notices a header of zeros when it reads or changes such a page. The service has the file open.
                file.write(bytes(16))
        world.batch(changes(page))
        step = world.follower.step()
        assert (step.error, step.is_caught_up) == (None, True), f"page {page}"
        print(json.dumps({"files_read": step.files_read}), flush=True)
    assert world.adopted() == 0
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
