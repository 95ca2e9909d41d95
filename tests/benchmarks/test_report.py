"""Arithmetic and file format of benchmark reports."""

import json
from pathlib import Path

import pytest
from report import Report, argument_parser, figure, figure_to_json, markdown, spread, table, take_turns


def test_a_rate_is_compared_ours_over_peer() -> None:
    measured = figure("decode.x", "tokens/s", [30.0, 10.0, 20.0], [8.0, 12.0, 10.0])
    assert (measured.value, measured.peer, measured.ratio) == (20.0, 10.0, 2.0)
    assert (measured.spread, measured.peer_spread, measured.rounds) == (1.0, 0.4, 3)


def test_a_time_is_compared_peer_over_ours() -> None:
    """Shorter is better, so a ratio above 1 always means that ours is better."""
    assert figure("hop", "us", [50.0], [100.0]).ratio == 2.0


def test_a_figure_without_peer_has_no_ratio() -> None:
    measured = figure("load", "s", [2.0, 4.0])
    assert (measured.value, measured.peer, measured.ratio, measured.peer_spread) == (3.0, None, None, None)


def test_spread_is_the_range_over_the_median() -> None:
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert spread([7.0]) == 0.0


def test_sides_take_turns_and_the_first_round_is_thrown_away() -> None:
    calls: list[tuple[str, int]] = []

    def side(name: str, base: float):
        def run(round_: int) -> float:
            calls.append((name, round_))
            return base + round_

        return run

    samples = take_turns(2, [side("a", 10.0), side("b", 20.0)])
    assert samples == [[11.0, 12.0], [21.0, 22.0]]
    assert calls == [("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]


def test_file_has_the_agreed_keys(tmp_path: Path) -> None:
    """{commit, date, machine, figures: [{name, value, unit, peer, ratio}]}, also while the run is still going."""
    path = tmp_path / "out" / "figures.json"
    report = Report("test", argument_parser("d").parse_args(["--quick", "--json", str(path)]))
    report.add(figure("decode.x", "tokens/s", [1 / 3], [0.25]))
    document = json.loads(path.read_text())
    assert document.keys() >= {"commit", "date", "machine", "figures", "load_before", "load_after"}
    assert document["quick"] is True
    (entry,) = document["figures"]
    assert (entry["name"], entry["unit"]) == ("decode.x", "tokens/s")
    assert (entry["value"], entry["peer"], entry["ratio"]) == (0.33333, 0.25, 1.3333)
    report.add(figure("hop", "us", [5.0]))
    entries = json.loads(path.read_text())["figures"]
    assert [item["name"] for item in entries] == ["decode.x", "hop"]
    assert all({"name", "value", "unit", "peer", "ratio"} <= item.keys() for item in entries)


def test_markdown_says_what_was_measured_where(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    report = Report("test", argument_parser("d").parse_args(["--json", str(path)]))
    report.add(figure("decode.x", "tokens/s", [30.0, 33.0], [10.0, 11.0]))
    report.add(figure("hop.p50_us", "us", [105.5]))
    document = json.loads(path.read_text())
    lines = markdown(document).splitlines()
    assert lines[2:4] == [
        "| decode.x | 31.5 | 10.5 | 3.00 | 10 % / 10 % | tokens/s |",
        "| hop.p50_us | 105.5 |  |  | 0 % | us |",
    ]
    assert document["commit"] in lines[-1]
    assert document["machine"] in lines[-1]


def test_empty_extras_are_left_out() -> None:
    assert figure_to_json(figure("x", "s", [1.0])).keys() == {
        "name", "value", "unit", "peer", "ratio", "rounds", "spread",
    }  # fmt: skip


def test_only_selects_by_pattern() -> None:
    report = Report("test", argument_parser("d").parse_args(["--only", "rpc.*", "--only", "ttft.cold_ms"]))
    assert report.wants("rpc.decode.smollm2.d0")
    assert report.wants("decode.smollm2.t1.d0", "ttft.cold_ms")
    assert not report.wants("decode.smollm2.t1.d0", "ttft.warm_ms")
    assert Report("test", argument_parser("d").parse_args([])).wants("anything")


def test_patterns_that_fit_nothing_are_said_and_leave_the_last_figures_alone(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("of the run before")
    report = Report("test", argument_parser("d").parse_args(["--only", "rcp.*", "--json", str(path)]))
    with pytest.raises(SystemExit, match=r"no figure was measured; --only rcp\.\*"):
        report.finish()
    try:
        raise KeyError
    except KeyError:
        report.finish()  # what ended the run is not hidden
    assert path.read_text() == "of the run before"


def test_table_lists_every_figure_in_aligned_columns() -> None:
    lines = table([figure("a", "us", [12345.6], [1.0]), figure("long.name", "tokens/s", [0.5])]).splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["a", "12,346", "1", "0.00", "0%", "/", "0%", "us"]
    assert lines[2].split() == ["long.name", "0.5", "0%", "tokens/s"]
    assert lines[0].index("ours") + len("ours") == lines[1].index("12,346") + len("12,346")
