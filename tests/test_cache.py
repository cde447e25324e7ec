"""One cache folder for all that can be made again."""

from pathlib import Path

import pytest

import paceline
from paceline.cache import cache_folder
from paceline.store.cache import Cache

from .lines import extracted


@pytest.mark.parametrize(
    ("own", "users", "found"),
    [
        ("/big/disk", "/user", "/big/disk"),
        ("~/big", "/user", "/home/me/big"),
        (None, "/user", "/user/paceline"),
        ("", "/user", "/user/paceline"),
        (None, "", "/home/me/.cache/paceline"),
        (None, "not/absolute", "/home/me/.cache/paceline"),
        (None, None, "/home/me/.cache/paceline"),
    ],
)
def test_the_folder_is_paceline_cache_or_in_the_users(monkeypatch, own, users, found):
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("PACELINE_CACHE", own), ("XDG_CACHE_HOME", users)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_folder() == Path(found)
    assert Cache().folder_of("a store").is_relative_to(found)


def test_copies_of_remote_stores_and_stores_on_their_way_lie_in_it(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    url = f"file://{tmp_path}/far"
    extracted(tmp_path, out=url)
    paceline.inspect(folder=url)
    assert sorted(path.name for path in folder.iterdir()) == ["staging", "stores"]
    assert not (tmp_path / "user").exists()
