"""The manual split: obeyed as written, or refused with the line of the mistake."""

from itertools import pairwise
from pathlib import Path

import pytest

from lamina.coordinator.planner.split_file import SplitEntry, parse_split, read_split_file
from lamina.spec.address import Address
from lamina.spec.errors import InvalidConfig, InvalidSplit
from lamina.spec.model import LayerRange

GOOD = """\
# two boxes
workers:
  - address: 127.0.0.1:50051
    layers: 0-11

  - address: "[::1]:50052"
    device: 1
    layers: 12-29
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "split.yaml"
    path.write_text(text)
    return path


def test_a_good_file(tmp_path: Path) -> None:
    assert read_split_file(written(tmp_path, GOOD)) == (
        SplitEntry(Address("127.0.0.1", 50051), 0, LayerRange(0, 12), 3),
        SplitEntry(Address("::1", 50052), 1, LayerRange(12, 30), 6),
    )


def test_a_single_layer(tmp_path: Path) -> None:
    (entry,) = read_split_file(written(tmp_path, "workers:\n- {address: 'a:1', layers: 5}\n"))
    assert entry.layers == LayerRange(5, 6)


MISTAKES = [
    ("", 1, "the file is empty; it needs a list `workers`"),
    ("# nothing\n", 1, "the file is empty"),
    ("- a\n- b\n", 1, "a mapping with workers is expected here"),
    ("hello\n", 1, "a mapping with workers"),
    ("workers:\n", 1, "`workers` must be a list with at least one entry"),
    ("workers: []\n", 1, "at least one entry"),
    ("workers: 3\n", 1, "at least one entry"),
    ("workers:\n  a: 1\n", 1, "must be a list"),
    ("\nworkers:\n- {address: 'a:1', layers: 0}\nmodel: x\n", 4, "unknown key 'model'; known: workers"),
    ("workers:\n- {address: 'a:1', layers: 0}\nworkers: []\n", 3, "'workers' is given twice"),
    ("workers:\n- 127.0.0.1:50051\n", 2, "a mapping with address, device, layers is expected"),
    ("workers:\n- address: a:1\n  layer: 0-3\n", 3, "unknown key 'layer'"),
    ("workers:\n- address: a:1\n  layers: 0-3\n  layers: 4\n", 4, "'layers' is given twice"),
    ("workers:\n- address: a:1\n\n- address: b:1\n  layers: 3\n", 2, "the worker has no `layers`"),
    ("workers:\n- layers: 0-3\n", 2, "the worker has no `address`"),
    ("workers:\n- address: a\n  layers: 0-3\n", 2, "address 'a' is not of the form host:port"),
    ("workers:\n- layers: 0-3\n  address: a:99999\n", 3, "port 99999 is not between"),
    ("workers:\n- address: ::1:5\n  layers: 0-3\n", 2, "is not of the form"),
    ("workers:\n- address: a:1\n  layers: 3-0\n", 3, "layer range '3-0' ends before it starts"),
    ("workers:\n- address: a:1\n  layers: 0..3\n", 3, "layer range '0..3' is not of the form"),
    ("workers:\n- address: a:1\n  layers:\n", 3, "layer range '' is not of the form"),
    ("workers:\n- address: a:1\n  layers: [0, 3]\n", 3, "`layers` must be a single value"),
    ("workers:\n- address: a:1\n  layers: 0-3\n  device: gpu\n", 4, "device 'gpu' is not a number"),
    ("workers:\n- address: a:1\n  layers: 0-3\n  device: -1\n", 4, "device '-1' is not a number"),
    ("workers:\n- address: a:1\n  layers: 0-3\n  device: \u0663\n", 4, "is not a number"),
    ("workers:\n- address: a:1\n  layers: 0-3\n  device: 99999999999\n", 4, "device '99999999999' is not a number"),
    ("workers:\n\t- address: a:1\n", 2, "not valid YAML: found character"),
    ("workers:\n- {address: 'a:1', layers: 0\n", 3, "not valid YAML"),
    ("workers: *nobody\n", 1, "not valid YAML: found undefined alias"),
    ("workers: !!python/object/apply:os.system [x]\n", 1, "a mapping with address"),
    ("workers:\n- ? [a]\n  : 1\n", 2, "unknown key"),
    ("a: 1\n---\nb: 2\n", 2, "not valid YAML: but found another document"),
]


@pytest.mark.parametrize(("text", "line", "said"), MISTAKES, ids=range(len(MISTAKES)))
def test_each_mistake_has_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidConfig, match=said) as caught:
        read_split_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ")
    assert "\n" not in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(InvalidConfig, match="cannot be read as a split file"):
            read_split_file(path)
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidConfig, match="cannot be read as a split file"):
        read_split_file(binary)
    binary.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InvalidConfig, match="larger than 1048576 bytes"):
        read_split_file(binary)


def test_a_hostile_file_is_refused_quickly(tmp_path: Path) -> None:
    """A thousand million laughs, and nesting without end."""
    laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in pairwise("abcdefghi")
    )
    for text in (laughs, "workers: " + "[" * 600):
        with pytest.raises(InvalidConfig):
            read_split_file(written(tmp_path, text))


def test_parse_split() -> None:
    assert parse_split("0-11,12-29") == (LayerRange(0, 12), LayerRange(12, 30))
    assert parse_split(" 0 - 1 , 2") == (LayerRange(0, 2), LayerRange(2, 3))
    for text in ("", "0-11,", "0-11;12", "a-b", "5-3", "-1", "0-1-2", "1e3"):
        with pytest.raises(InvalidSplit, match="layer range"):
            parse_split(text)
