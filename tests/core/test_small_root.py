"""The root that recordings are made of."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

from small_root import fixed_ids


def test_ids_are_fixed_whatever_other_threads_do() -> None:
    with fixed_ids():
        alone = [uuid.uuid4() for _ in range(3)]
    with fixed_ids(), ThreadPoolExecutor(1) as other:
        beside = [(uuid.uuid4(), other.submit(uuid.uuid4).result())[0] for _ in range(3)]
    assert beside == alone
