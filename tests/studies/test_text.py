"""Figures, names and tables as people read and write them."""

from protofed.text import Table, duration, p_equals, p_value, percent, setting, size, split_names


def test_figures() -> None:
    assert [percent(None), percent(0.12345)] == ["-", "12.35"]
    assert [size(None), size(999), size(1500), size(2.5e9), size(2.5e13)] == [
        "-", "999 B", "1.5 kB", "2.5 GB", "25000.0 GB"
    ]  # fmt: skip
    assert [duration(s) for s in (1.25, 61, 700, 7200)] == ["1.2 s", "1 min 1 s", "12 min", "2.0 h"]
    assert [setting(value) for value in (True, False, 0.5, None)] == ["on", "off", "0.5", "None"]


def test_a_small_p_value_is_never_nought() -> None:
    assert [p_value(p) for p in (None, 0.9, 0.0011, 0.0009, 0.0)] == ["-", "0.900", "0.001", "< 0.001", "< 0.001"]
    assert [p_equals(p) for p in (0.0123, 0.0)] == ["p = 0.012", "p < 0.001"]


def test_names() -> None:
    assert split_names(None) is None
    assert split_names("a, b,") == split_names(("a", "b")) == ["a", "b"]


def test_a_table_in_markdown() -> None:
    rows = [["fedavg", "1.0"], ["i2pfl", "2.0"]]
    table = Table("Accuracy", ["method", "%"], rows)
    assert table.markdown() == "| method | % |\n| :-- | --: |\n| fedavg | 1.0 |\n| i2pfl | 2.0 |"
    assert Table("Words", ["a", "b"], [], numeric=False).markdown() == "| a | b |\n| :-- | :-- |"
    assert Table(**table.as_dict()) == table
