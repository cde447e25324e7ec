"""Lines about samples survive what cuts them."""

from pathlib import Path

from paceline.extract.sink import FLAGS_PATTERN, append_line, read_lines


def test_a_line_that_was_cut_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / FLAGS_PATTERN.format(worker=0)
    for name in ("a", "b"):
        append_line(path, {"sample_id": name, "flags": ["é\u2028}"]})
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        append_line(path, {"sample_id": "c", "flags": []})
        found = [entry["sample_id"] for entry in read_lines(tmp_path, FLAGS_PATTERN)]
        assert found[-1] == "c"
        assert found[:-1] == ["a", "b"][: len(found) - 1]
    assert found == ["a", "b", "c"]


def test_the_last_word_on_a_sample_counts(tmp_path: Path) -> None:
    path = tmp_path / FLAGS_PATTERN.format(worker=0)
    for flags in (["x"], ["y"]):
        append_line(path, {"sample_id": "a", "flags": flags})
    assert read_lines(tmp_path, FLAGS_PATTERN) == [{"sample_id": "a", "flags": ["y"]}]
