"""Small JSON documents in a torch Store, each changed by any process, one change at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_EMPTY = "{}"


class Documents:
    """Optimistic transactions on single keys of a Store, by its compare_set.

    Args:
        store: that can compare_set, such as a TCPStore; all processes use the same.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def read(self, key: str) -> dict[str, Any]:
        """The document, which is empty before its first change. Does not wait."""
        return json.loads(self._text(key))  # type: ignore[no-any-return]

    def change(self, key: str, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Applies `change` to the newest document, as often as others change it meanwhile.

        Args:
            change: changes the document in place; it may run several times.

        Returns:
            The document after this change.
        """
        while True:
            old = self._text(key)
            document: dict[str, Any] = json.loads(old)
            change(document)
            new = json.dumps(document)
            if new == old or self._swap(key, old, new) == new:
                return document

    def _text(self, key: str) -> str:
        # Unlike get(), this does not wait for a key that nobody has set.
        return self._swap(key, "", _EMPTY)

    def _swap(self, key: str, expected: str, desired: str) -> str:
        return self._store.compare_set(key, expected, desired).decode()
