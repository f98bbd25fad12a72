"""Small JSON documents in a torch Store, each changed by any process, one change at a time."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# A document stands beside a random number of the change that wrote it. Without that, two processes
# that make the same change at once would both take it for theirs.
_EMPTY = json.dumps(["", {}])


class Documents:
    """Optimistic transactions on single keys of a Store, by its compare_set."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def read(self, key: str) -> dict[str, Any]:
        """The document, which is empty before its first change. Does not wait."""
        _, document = json.loads(self._text(key))
        return document  # type: ignore[no-any-return]

    def change(self, key: str, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Applies `change` in place to the newest document, as often as others change it meanwhile;
        returns the document after that."""
        while True:
            old = self._text(key)
            document: dict[str, Any] = json.loads(old)[1]
            change(document)
            new = json.dumps([uuid.uuid4().hex, document])
            if self._swap(key, old, new) == new:
                return document

    def _text(self, key: str) -> str:
        # Unlike get(), this does not wait for a key that nobody has set.
        return self._swap(key, "", _EMPTY)

    def _swap(self, key: str, expected: str, desired: str) -> str:
        return self._store.compare_set(key, expected, desired).decode()
