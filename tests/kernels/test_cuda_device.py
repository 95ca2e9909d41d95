"""The device of a real card over libraries that are not: memory, products, compilation, what is given back."""

import errno
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import DType
from lamina.kernels.cuda import driver as driver_module
from lamina.kernels.cuda.card import Card, num_cards
from lamina.kernels.cuda.compiler import Compiler, Nvrtc, Source
from lamina.kernels.cuda.cublas import Cublas
from lamina.kernels.cuda.cuda_device import CudaDevice, Libraries
from lamina.kernels.cuda.device import KernelCall, Matrix, Memory, ProductCall, Span
from lamina.kernels.cuda.libcuda import CudaError
from lamina.kernels.cuda.programs import program
from lamina.spec.errors import CapacityExceeded
from support.cuda_emulated import EmulatedDevice
from support.cuda_fakes import MIB, TOTAL_BYTES, FakeCublas, FakeDriver, FakeNvrtc


def make(tmp_path: Path, driver: FakeDriver | None = None, index: int = 0) -> tuple[CudaDevice, Libraries]:
    libraries = Libraries(driver or FakeDriver((9, 0)), FakeNvrtc(), FakeCublas())
    return CudaDevice(index, libraries, tmp_path), libraries


def test_what_a_card_says_of_itself(tmp_path: Path) -> None:
    device, libraries = make(tmp_path, FakeDriver((8, 0), (8, 9)), 1)
    assert (device.name, device.compute_capability, device.num_multiprocessors) == ("Card 1 (cuda:1)", (8, 9), 132)
    assert device.uuid == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert num_cards(libraries.driver) == 2
    libraries.driver.status = 100  # no card, or a driver that is not loaded
    assert num_cards(libraries.driver) == 0


def test_cards_and_libraries_that_do_not_go_together(tmp_path: Path) -> None:
    """B-08, A-22: said before anything is made on the card."""
    with pytest.raises(Unsupported, match="cuda:1 is not there: the NVIDIA driver shows 1 GPUs"):
        make(tmp_path, FakeDriver((9, 0)), 1)
    stopped = FakeDriver((9, 0))
    stopped.status = 100
    with pytest.raises(Unsupported, match="cuda:0 is not there: the NVIDIA driver shows 0 GPUs"):
        make(tmp_path, stopped)
    stopped.status = 803
    with pytest.raises(Unsupported, match="driver does not start: CUDA_ERROR_INJECTED; see what nvidia-smi says"):
        make(tmp_path, stopped)
    with pytest.raises(Unsupported, match=r"capability 6\.1, the installed CUDA 13\.0"):
        make(tmp_path, FakeDriver((6, 1)))
    with pytest.raises(Unsupported, match=r"driver of Card 0 \(cuda:0\) is for CUDA 12\.4"):
        make(tmp_path, FakeDriver((9, 0), version=12040))


def test_copies_that_wait_for_the_card_let_go_of_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B-10: those of pageable memory may last as long as a prompt; nothing else of the process would run meanwhile."""
    held: list[str] = []

    class Holding:
        def __init__(self, library: FakeDriver) -> None:
            self._library = library

        def __getattr__(self, name: str) -> Any:
            held.append(name)
            return getattr(self._library, name)

    monkeypatch.setattr(driver_module, "holding_the_interpreter", Holding)
    device, _ = make(tmp_path)
    span = Span(device.allocate(64), 0, 1, 64, 64)
    device.upload(span, np.arange(64, dtype=np.uint8))
    assert np.array_equal(device.download(span).ravel(), np.arange(64))
    assert not held
    transfer = transfer_of(device, MIB)
    transfer.upload(MIB)
    transfer.download(MIB)
    assert held == ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"]


def transfer_of(device: CudaDevice, num_bytes: int, offset: int = 0) -> Any:
    memory = device.allocate(num_bytes + offset)
    return device.transfer(Span(memory, offset, 1, num_bytes, num_bytes), device.alloc_pinned(num_bytes))


@pytest.mark.parametrize(
    ("num_bytes", "offset", "by_kernel"),
    [(4, 0, 1), (1 << 16, 4, 1), (0, 0, 0), ((1 << 16) + 4, 0, 0), (6, 0, 0), (8, 2, 0)],
)
def test_small_transfers_are_launches(tmp_path: Path, num_bytes: int, offset: int, by_kernel: int) -> None:
    """Of whole words at whole words; all others are the driver's."""
    device, libraries = make(tmp_path)
    transfer = transfer_of(device, max(num_bytes, 64), offset)
    transfer.upload(num_bytes)
    transfer.download(num_bytes)
    assert len(libraries.driver.launches) == 2 * by_kernel


def test_memory_is_zeroed_counted_and_given_back(tmp_path: Path) -> None:
    """B-10: the free bytes are the driver's, nothing is held back; close takes what was not released."""
    device, libraries = make(tmp_path)
    before = device.memory_bytes()
    assert before == (TOTAL_BYTES - 32 * MIB, TOTAL_BYTES)  # cuBLAS has its workspace
    kept, released = device.allocate(1000), device.allocate(3 * MIB)
    assert not device.download(Span(released, 0, 1, 3 * MIB, 3 * MIB)).any()
    device.release(released)
    assert device.memory_bytes()[0] == before[0] - kept.num_bytes
    with pytest.raises(CapacityExceeded, match=r"no room for 2048\.0 MiB on Card 0 \(cuda:0\): 992\.0 of 1024\.0 MiB"):
        device.allocate(2 << 30)
    device.close()
    assert (libraries.driver.memory, libraries.cublas.open) == ({}, 0)
    assert set(map(str, libraries.driver.handles.values())) <= {"event"}, "streams and modules are gone"


def test_page_locked_memory_lives_as_long_as_its_arrays(tmp_path: Path) -> None:
    """B-10: zeroed; freed not when it is dropped, which may be within a capture, but at the next call for more."""
    device, libraries = make(tmp_path)
    values = device.alloc_pinned(64)
    view = values.view(np.float32)[3:]
    assert not values.any()
    del values
    gc.collect()
    device.alloc_pinned(8)
    assert sorted(each.nbytes for each in libraries.driver.pinned.values()) == [8, 64]
    view[:] = 1
    del view
    gc.collect()
    device.alloc_pinned(16)
    assert sorted(each.nbytes for each in libraries.driver.pinned.values()) == [16]


@pytest.mark.parametrize(("offset", "pitch"), [(0, 24), (8, 40)], ids=["contiguous", "with gaps"])
def test_rows_go_up_down_and_across(tmp_path: Path, offset: int, pitch: int) -> None:
    device, _ = make(tmp_path)
    source, target = device.allocate(512), device.allocate(512)
    values = np.random.default_rng(1).integers(0, 256, (5, 24), np.uint8)
    device.upload(Span(source, offset, 5, 24, pitch), values)
    assert np.array_equal(device.download(Span(source, offset, 5, 24, pitch)), values)
    device.copy(Span(source, offset, 5, 24, pitch), Span(target, 16, 5, 24, 32))
    assert np.array_equal(device.download(Span(target, 16, 5, 24, 32)), values)
    assert not device.download(Span(target, 16 + 24, 5, 8, 32)).any(), "between the rows nothing was written"


# -- products


def matrix(
    rng: np.random.Generator, values: np.ndarray, dtype: DType, gap: int, offset: int
) -> tuple[Matrix, np.ndarray]:
    """Rows with gaps after an offset, in memory of the host, and that memory."""
    rows, columns = values.shape
    stride = columns + gap
    raw = rng.integers(0, 256, offset + rows * stride * dtype.itemsize, np.uint8)
    at = raw[offset:].view(dtype.host_dtype).reshape(rows, stride)
    at[:, :columns] = values.view(np.uint32) >> 16 if dtype is DType.BF16 else values
    return Matrix(Memory(raw.ctypes.data, raw.nbytes), offset, rows, columns, stride, dtype), at


@given(
    sizes=st.tuples(*[st.integers(1, 9)] * 3),
    gaps=st.tuples(*[st.integers(0, 4)] * 3),
    dtype=st.sampled_from([DType.F32, DType.F16, DType.BF16]),
    accumulate=st.booleans(),
    seed=st.integers(0, 99),
)
def test_row_major_products_by_a_column_major_library(
    sizes: tuple[int, int, int], gaps: tuple[int, int, int], dtype: DType, accumulate: bool, seed: int
) -> None:
    """out [n, m] = x [n, k] weight [m, k]^T, whatever lies between the rows, which stays as it is."""
    rng = np.random.default_rng(seed)
    n, m, k = sizes
    # integers, which every dtype holds
    x, weight, old = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((n, k), (m, k), (n, m)))
    operands = [
        matrix(rng, values, kind, gap, 16 * gap)
        for values, kind, gap in zip((x, weight, old), (dtype, dtype, DType.F32), gaps, strict=True)
    ]
    out = operands[2][1]
    between = out[:, m:].tobytes()
    Cublas(FakeCublas(), 1, 0, 0).multiply(ProductCall(*(each for each, _ in operands), accumulate))
    assert np.array_equal(out[:, :m], x @ weight.T + (old if accumulate else 0))
    assert out[:, m:].tobytes() == between


def test_the_workspace_is_ours(tmp_path: Path) -> None:
    """B-09: set after the stream, whose setting would undo it; products in a capture allocate nothing then."""
    _, libraries = make(tmp_path)
    address, num_bytes = libraries.cublas.workspace
    assert num_bytes == 32 * MIB
    assert libraries.driver.within(address, num_bytes)
    assert libraries.cublas.stream in libraries.driver.handles


def test_what_cublas_fails_with() -> None:
    """C-04: a card without memory is the request's error, anything else the device's."""
    library = FakeCublas()
    library.status = 3
    with pytest.raises(CapacityExceeded, match="no memory is left for cuBLAS"):
        Cublas(library, 1, 0, 0)
    library.status = 13
    with pytest.raises(CudaError, match="cuBLAS failed: cuBLAS status 13"):
        Cublas(library, 1, 0, 0)


# -- kernels


def test_a_program_is_compiled_loaded_and_launched_once(tmp_path: Path) -> None:
    """C-02: for the very card; the next start finds it in the folder."""
    device, libraries = make(tmp_path)
    call = KernelCall(program("rows.cu", "set_shape"), (1, 1, 1), 32, (0, 1, 2, 3))
    for _ in range(2):
        device.run(call)
    (function, stream), again = libraries.driver.launches
    assert again == (function, stream)
    image, name = libraries.driver.handles[function]
    assert image.startswith(b"sm_90a:")
    assert (name, len(libraries.nvrtc.compiled)) == (b"set_shape", 1)
    after, libraries = make(tmp_path)
    after.prepare([call.program])
    assert libraries.nvrtc.compiled == []


def test_what_a_kept_kernel_depends_on(tmp_path: Path) -> None:
    """Source, options, target and compiler each have it compiled anew; equal ones never."""
    library = FakeNvrtc()

    def compile_with(
        version: tuple[int, int] = (13, 0), target: str = "sm_89", text: str = "a", option: str = "-DX=1"
    ) -> bytes:
        nvrtc = Nvrtc(library)
        nvrtc.version = version
        return Compiler(nvrtc, target, tmp_path).compile_all([Source("k.cu", text, (option,))])[0]

    for _ in range(2):
        assert compile_with() == b"sm_89:a"
        compile_with(version=(13, 1))
        assert compile_with(target="compute_89") == b"compute_89:a"
        assert compile_with(text="b") == b"sm_89:b"
        compile_with(option="-DX=2")
        assert len(library.compiled) == 5
    assert library.live == {}, "every program was destroyed"


def test_many_at_once_come_in_order(tmp_path: Path) -> None:
    library = FakeNvrtc()
    compiler = Compiler(Nvrtc(library), "sm_89", tmp_path)
    compiler.compile_all([Source("k.cu", text, ()) for text in "bd"])
    assert compiler.compile_all([Source("k.cu", text, ()) for text in "abcde"]) == [b"sm_89:%c" % c for c in b"abcde"]
    assert len(library.compiled) == 5


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    """A disk that was full, a process that was killed: what the folder holds is not trusted blindly."""
    library = FakeNvrtc()
    source = Source("k.cu", "text", ())
    for damage in (bytes(3), b"", bytes(100)):
        assert Compiler(Nvrtc(library), "sm_89", tmp_path).compile_all([source]) == [b"sm_89:text"]
        (file,) = tmp_path.iterdir()
        file.write_bytes(damage)
    assert len(library.compiled) == 3


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, whichever of the compiling threads meets it first; the worker starts all the same."""
    (tmp_path / "file").write_text("")
    compiler = Compiler(Nvrtc(FakeNvrtc()), "sm_89", tmp_path / "file" / "folder")
    together, write = threading.Barrier(2), compiler._write

    def write_together(source: Source, code: bytes) -> None:
        together.wait(10)  # both find that they may
        write(source, code)

    monkeypatch.setattr(compiler, "_write", write_together)
    assert compiler.compile_all([Source("k.cu", text, ()) for text in "ab"]) == [b"sm_89:a", b"sm_89:b"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "every start compiles them" in caplog.text


def test_a_disk_that_is_full_gets_its_bytes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of what could not be written whole is left in the folder."""

    def write_half(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    compiler = Compiler(Nvrtc(FakeNvrtc()), "sm_89", tmp_path)
    assert compiler.compile_all([Source("k.cu", "a", ())]) == [b"sm_89:a"]
    assert list(tmp_path.iterdir()) == []
    assert "No space left on device" in caplog.text


def test_what_does_not_compile_says_why(tmp_path: Path) -> None:
    library = FakeNvrtc()
    with pytest.raises(CudaError, match=r"k\.cu -DX=1 does not compile for sm_89: .*syntax error"):
        Compiler(Nvrtc(library), "sm_89", tmp_path).compile_all([Source("k.cu", "syntax error", ("-DX=1",))])
    assert (library.live, list(tmp_path.iterdir())) == ({}, [])


# -- two cards


@pytest.mark.parametrize(
    ("peers", "garbles", "switched"),
    [(False, False, []), (True, False, [(0xC1, 1)]), (True, True, [(0xC1, 1), (0xC1, 0)])],
    ids=["no peer access", "peer access", "peer access that lies"],
)
def test_copies_from_another_card(
    tmp_path: Path, peers: bool, garbles: bool, switched: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Peer access is used if it delivers what was sent; how copies go is said once."""
    caplog.set_level("INFO")
    driver = FakeDriver((9, 0), (9, 0), peers=peers)
    (one, _), (two, _) = (make(tmp_path, driver, index) for index in range(2))
    one.bind_to_thread()
    source, target = two.allocate(64), one.allocate(64)
    values = np.arange(32, dtype=np.uint8).reshape(4, 8)
    two.upload(Span(source, 0, 4, 8, 16), values)
    assert one.reaches(two)
    before = set(driver.memory)
    driver.garbles_peer_copies = garbles
    one.copy_from(two, Span(source, 0, 1, 8, 8), Span(target, 0, 1, 8, 8))
    driver.garbles_peer_copies = False
    one.copy_from(two, Span(source, 0, 4, 8, 16), Span(target, 0, 4, 8, 8))
    assert np.array_equal(one.download(Span(target, 0, 4, 8, 8)), values)
    assert driver.launches == switched
    assert set(driver.memory) == before, "the trial's memory is given back"
    assert len([record for record in caplog.records if "copies to" in record.getMessage()]) == 1


def test_two_devices_of_one_card(tmp_path: Path) -> None:
    """A copy between them is one within the card."""
    driver = FakeDriver((9, 0))
    (one, _), (two, _) = make(tmp_path, driver), make(tmp_path, driver)
    source, target = one.allocate(8), two.allocate(8)
    one.upload(Span(source, 0, 1, 8, 8), np.arange(8, dtype=np.uint8).reshape(1, 8))
    two.copy_from(one, Span(source, 0, 1, 8, 8), Span(target, 0, 1, 8, 8))
    assert two.download(Span(target, 0, 1, 8, 8)).tolist() == [list(range(8))]
    assert driver.launches == []
    one.close()
    assert two.download(Span(target, 0, 1, 8, 8)).tolist() == [list(range(8))]


def test_a_card_is_current_where_it_was_bound() -> None:
    """B-04: calls that need a context bring it along, and leave the thread as it was."""
    driver = FakeDriver((9, 0), (9, 0))
    cards = [Card(driver, index) for index in range(2)]
    for card in cards:
        card.open()
    address = cards[0].allocate(16)
    assert driver.contexts == [0xC1]
    cards[0].free(address)
    cards[0].bind_to_thread()
    assert driver.contexts == [0xC0]


def test_two_cards_of_one_thread(tmp_path: Path) -> None:
    """B-04: whichever was opened or used last, calls find their own card; handles of one mean nothing to another."""
    driver = FakeDriver((9, 0), (9, 0))
    devices = [make(tmp_path, driver, index)[0] for index in range(2)]
    call = KernelCall(program("rows.cu", "set_shape"), (1, 1, 1), 32, (0, 1, 2, 3))
    events = [device.create_event() for device in devices]
    for device, event in [*zip(devices, events, strict=True)] * 2:
        device.run(call)
        device.record_event(event)
    assert len({stream for _, stream in driver.launches}) == len({function for function, _ in driver.launches}) == 2


@pytest.mark.parametrize("count", [1, 255, 256, 257, 3584])
def test_the_kernel_of_small_transfers_copies_just_so_many_words(count: int) -> None:
    device = EmulatedDevice()
    source, target = (np.random.default_rng(seed).integers(0, 2**32, count + 9, np.uint32) for seed in (1, 2))
    wanted = np.concatenate([source[:count], target[count:]])
    grid = (-(-count // 256), 1, 1)
    device.run(KernelCall(program("rows.cu", "copy_words"), grid, 256, (source.ctypes.data, target.ctypes.data, count)))
    assert np.array_equal(target, wanted)
