"""Whether ranks have the same, and which of them have what if they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rota.errors import Mismatch


def sides(texts: Sequence[str], verb: str) -> str | None:
    """Which ranks have which text, as "rank 0, 2 has x; rank 1 has y"; None if all are alike."""
    ranks_of: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(str(rank))
    if len(ranks_of) == 1:
        return None
    return "; ".join(f"rank {', '.join(ranks)} {verb} {text}" for text, ranks in ranks_of.items())


def check_alike(
    what: str, described: Sequence[Mapping[str, object]], advice: str = "give all the same"
) -> None:
    """Raises Mismatch if the ranks' descriptions differ in a value, or a rank lacks one."""
    for key in dict.fromkeys(key for of_rank in described for key in of_rank):
        texts = [str(of_rank.get(key, "nothing")) for of_rank in described]
        if difference := sides(texts, "has"):
            raise Mismatch(f"{what}: ranks disagree on {key}: {difference}; {advice}")
