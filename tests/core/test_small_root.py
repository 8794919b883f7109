"""The small root that the recordings of the documents are made from."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

from small_root import fixed_ids


def test_fixed_ids_do_not_depend_on_other_threads() -> None:
    with fixed_ids():
        alone = [uuid.uuid4() for _ in range(3)]
    with fixed_ids(), ThreadPoolExecutor(1) as other:
        with_other_thread = [(uuid.uuid4(), other.submit(uuid.uuid4).result())[0] for _ in range(3)]
    assert with_other_thread == alone
