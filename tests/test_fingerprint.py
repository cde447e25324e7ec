"""Fingerprints: equal for equal things, different for different ones."""

import hashlib
import importlib.metadata

import pytest

from paceline import fingerprint


def test_json_in_any_order_is_the_same_thing():
    assert fingerprint.of_json({"a": 1, "b": [1, 2]}) == fingerprint.of_json({"b": [1, 2], "a": 1})
    assert fingerprint.of_json({"a": 1}) != fingerprint.of_json({"a": 2})
    assert fingerprint.of_json([1, 2]) != fingerprint.of_json([2, 1])
    assert fingerprint.of_json("1") != fingerprint.of_json(1)


def test_bytes_are_hashed_as_written_down():
    assert fingerprint.of_bytes(b"paceline") == hashlib.sha256(b"paceline").hexdigest()[:32]


def test_a_file_by_its_content_and_not_its_name(tmp_path):
    for name, data in (("a", b"same"), ("b", b"same"), ("c", b"sane")):
        (tmp_path / name).write_bytes(data)
    a, b, c = (fingerprint.of_file(tmp_path / name) for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("place", ["start", "end", "size"])
def test_a_large_file_is_sampled_at_both_ends(tmp_path, place):
    size = (64 << 20) + 12345
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(size)  # sparse: costs no disk
    before = fingerprint.of_file(path)
    assert fingerprint.of_file(path) == before
    with path.open("rb+") as file:
        if place == "size":
            file.truncate(size + 1)
        else:
            file.seek(0 if place == "start" else size - 1)
            file.write(b"x")
    assert fingerprint.of_file(path) != before


def test_the_border_between_whole_and_sampled_loses_no_byte(tmp_path):
    # Every byte counts up to 64 MiB: one in the middle, far from any sample of a larger file.
    path = tmp_path / "whole"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    before = fingerprint.of_file(path)
    with path.open("rb+") as file:
        file.seek((32 << 20) + 777_777)
        file.write(b"x")
    assert fingerprint.of_file(path) != before


def test_a_whole_file_is_read_however_large(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    whole = fingerprint.of_file(path)
    for name, value in (("_WHOLE_FILE_BYTES", 100), ("_SAMPLE_BYTES", 8), ("_BLOCK_BYTES", 64)):
        monkeypatch.setattr(fingerprint, name, value)
    assert fingerprint.of_whole_file(path) == whole != fingerprint.of_file(path)
    path.write_bytes(b"x" * 511 + b"y" + b"x" * 488)
    assert fingerprint.of_whole_file(path) != whole


def test_files_by_name_and_content_wherever_they_lie(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one").write_bytes(b"1")
        (tmp_path / folder / "two").write_bytes(b"2")
    x = [tmp_path / "x" / n for n in ("one", "two")]
    y = [tmp_path / "y" / n for n in ("two", "one")]
    assert fingerprint.of_files(x) == fingerprint.of_files(y)
    (tmp_path / "y" / "two").write_bytes(b"1")
    (tmp_path / "y" / "one").write_bytes(b"2")
    assert fingerprint.of_files(x) != fingerprint.of_files(y)


def test_versions_of_what_is_installed_and_of_nothing_else():
    versions = fingerprint.package_versions()
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["paceline"] == importlib.metadata.version("paceline")
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    assert set(versions) <= installed
