"""Sample ids that options give, one by one or in a file."""

from pathlib import Path

from paceline.errors import UsageError
from paceline.store import Store

_MOST_SHOWN = 5


def wanted_ids(ids: list[str], ids_file: str) -> list[str]:
    """Ids of both options in order, each once. Raises UsageError for a file that is not there."""
    found = list(ids)
    if ids_file:
        path = Path(ids_file)
        if not path.is_file():
            raise UsageError(f"ids_file: {path} is no file")
        found += [line.strip() for line in path.read_text().splitlines() if line.strip()]
    return list(dict.fromkeys(found))


def find_all(store: Store, ids: list[str]) -> list[int]:
    """Indices of samples. Raises UsageError that names those that the store does not have."""
    indices, missing = [], []
    for sample_id in ids:
        try:
            indices.append(store.records.find(sample_id))
        except KeyError:
            missing.append(sample_id)
    if missing:
        shown = ", ".join(map(repr, missing[:_MOST_SHOWN]))
        more = f" and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
        raise UsageError(f"{store.folder} has no sample {shown}{more}")
    return indices
