"""What a card may do, from its compute capability alone."""

import pytest

from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import DType
from lamina.kernels.cuda.policy import GraphMode, compute_dtype, graph_policy, require_supported

CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


@pytest.mark.parametrize(
    ("cc", "enabled", "probe"),
    [((8, 9), True, False), ((7, 0), True, False), ((6, 1), True, True), ((6, 0), True, True), ((5, 2), False, False)],
)
def test_graphs_by_architecture(cc: tuple[int, int], enabled: bool, probe: bool) -> None:
    """C-13: on from 7.0, a probe on 6.x, off below, and the reason names the capability."""
    decision = graph_policy(cc, GraphMode.AUTO)
    assert (decision.enabled, decision.probe) == (enabled, probe)
    assert f"{cc[0]}.{cc[1]}" in decision.reason


@pytest.mark.parametrize("cc", [(5, 2), (6, 1), (9, 0)])
def test_the_operator_decides(cc: tuple[int, int]) -> None:
    """C-14: on and off are obeyed on every card, without a probe."""
    assert not graph_policy(cc, GraphMode.OFF).enabled
    assert graph_policy(cc, GraphMode.ON).enabled
    assert not graph_policy(cc, GraphMode.ON).probe


@pytest.mark.parametrize(
    ("cc", "archs", "nvrtc"),
    [
        ((9, 0), CU130, (13, 0)),
        ((8, 9), CU130, (13, 0)),  # sm_86 code runs on 8.9
        ((12, 1), CU130, (13, 2)),  # so does PTX of 12.0 on 12.1
        ((6, 1), CU126, (12, 6)),  # the sm_60 code of cu126 serves 6.1
        ((7, 0), CU126, (12, 9)),
    ],
)
def test_cards_that_the_build_serves(cc: tuple[int, int], archs: tuple[str, ...], nvrtc: tuple[int, int]) -> None:
    """B-08: machine code serves later cards of its major version, PTX all later cards."""
    require_supported("a card", cc, archs, nvrtc)


@pytest.mark.parametrize(
    ("cc", "archs", "nvrtc", "named"),
    [
        ((6, 1), CU130, (13, 0), "sm_75.*cu126"),
        ((7, 0), ("sm_70",), (13, 0), "CUDA 13.0.*7.5.*cu126"),
        ((5, 2), CU126, (12, 6), "6.1"),
        ((10, 0), ("sm_90a",), (13, 0), "sm_90a"),
        ((9, 0), ("sm_86", "sm_90x"), (13, 0), "sm_86"),
        ((12, 0), ("sm_100f",), (13, 0), "sm_100f"),
    ],
)
def test_cards_that_the_build_cannot_run(
    cc: tuple[int, int], archs: tuple[str, ...], nvrtc: tuple[int, int], named: str
) -> None:
    """B-08: the refusal names the card's capability and what the build has; sm_90a is not forward compatible."""
    with pytest.raises(Unsupported, match=rf"{cc[0]}\.{cc[1]}.*{named}"):
        require_supported("a card", cc, archs, nvrtc)


def test_arithmetic_by_generation() -> None:
    """A-01: bf16 where native, f16 on tensor cores without it, f32 on Pascal."""
    wanted = {(6, 1): DType.F32, (7, 0): DType.F16, (7, 5): DType.F16, (8, 0): DType.BF16, (12, 0): DType.BF16}
    assert {cc: compute_dtype(cc) for cc in wanted} == wanted
