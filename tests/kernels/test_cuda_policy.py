"""What a card may do, from its compute capability alone."""

import pytest

from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import DType
from lamina.kernels.cuda.policy import GraphMode, compile_target, compute_dtype, graph_policy, require_supported

CUDA_12 = ((5, 0), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))  # what NVRTC knows
CUDA_13 = ((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0), (12, 1))


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
    ("cc", "driver", "compiler"),
    [
        ((6, 1), (12, 4), (12, 9)),  # a driver serves all of its major version
        ((7, 0), (12, 9), (12, 9)),
        ((6, 1), (13, 0), (12, 9)),
        ((7, 5), (13, 0), (13, 0)),
        ((9, 0), (13, 0), (13, 2)),
    ],
)
def test_cards_that_the_libraries_serve(
    cc: tuple[int, int], driver: tuple[int, int], compiler: tuple[int, int]
) -> None:
    """B-08, C-01: Pascal and Volta by CUDA 12, Turing and later by both."""
    require_supported("a card", cc, driver, compiler)


@pytest.mark.parametrize(
    ("cc", "driver", "compiler", "said"),
    [
        ((6, 1), (12, 9), (13, 0), r"6\.1, the installed CUDA 13\.0 serves 7\.5 .*uninstall nvidia-.*lamina\[cuda12\]"),
        ((7, 0), (13, 0), (13, 1), r"7\.0, the installed CUDA 13\.1 .*lamina\[cuda12\]"),
        ((5, 2), (12, 9), (12, 9), r"5\.2; lamina needs 6\.1"),
        ((8, 9), (12, 8), (13, 0), r"driver of a card is for CUDA 12\.8, .* of 13\.0; .*newer driver.*cuda12"),
    ],
)
def test_cards_that_the_libraries_cannot_run(
    cc: tuple[int, int], driver: tuple[int, int], compiler: tuple[int, int], said: str
) -> None:
    """B-08: one line says what the card is, what is installed, and what to install."""
    with pytest.raises(Unsupported, match=said) as refused:
        require_supported("a card", cc, driver, compiler)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("cc", "known", "target"),
    [
        ((6, 1), CUDA_12, "sm_61"),
        ((8, 9), CUDA_13, "sm_89"),
        ((9, 0), CUDA_13, "sm_90a"),  # with wgmma, which code for plain sm_90 may not use
        ((12, 1), CUDA_12, "compute_120"),  # PTX runs on any later card; machine code of 8.7 (Orin) not even on 8.8
        ((13, 0), CUDA_13, "compute_121"),
    ],
)
def test_what_is_compiled_for(cc: tuple[int, int], known: tuple[tuple[int, int], ...], target: str) -> None:
    """C-02: machine code for the very card wherever the compiler knows it."""
    assert compile_target(cc, known) == target


def test_nothing_to_compile_for() -> None:
    with pytest.raises(Unsupported, match=r"nothing as old as compute capability 7\.0"):
        compile_target((7, 0), CUDA_13)


def test_arithmetic_by_generation() -> None:
    """A-01: bf16 where native, f16 on tensor cores without it, f32 on Pascal."""
    wanted = {(6, 1): DType.F32, (7, 0): DType.F16, (7, 5): DType.F16, (8, 0): DType.BF16, (12, 0): DType.BF16}
    assert {cc: compute_dtype(cc) for cc in wanted} == wanted
