"""Handshake: a peer of another protocol or schema is refused, both named (C-03, P-25); settings travel whole (B-44)."""

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.spec.device import PROTOCOL_MAJOR, DeviceHealth, DeviceProfile, GraphCounts, Version
from lamina.spec.errors import InvalidConfig, VersionMismatch
from lamina.spec.ids import DeviceId, WorkerName
from lamina.spec.placement import KV_DTYPES, MAX_ROWS, WIRE_DTYPES, StageSettings
from lamina.spec.quant import GgmlType
from lamina.v1 import cluster_pb2, step_pb2
from lamina.v1 import worker_pb2 as wpb
from lamina.wire.profiles import (
    device_to_message,
    graphs_to_message,
    settings_from_message,
    settings_to_message,
    version_from_message,
    version_to_message,
    worker_from_message,
)
from lamina.wire.version import check_peer, own_version


def test_the_schema_digest_is_of_all_three_files() -> None:
    files = (step_pb2, wpb, cluster_pb2)
    raw = b"".join(module.DESCRIPTOR.serialized_pb for module in files)
    assert own_version().schema_digest == hashlib.sha256(raw).digest()


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"protocol_major": PROTOCOL_MAJOR + 1}, "protocol versions differ"),
        ({"schema_digest": b"\xab" * 32}, "wire schemas differ"),
    ],
)
def test_a_mismatch_names_both(change: dict[str, object], cause: str) -> None:
    own = own_version()
    peer = replace(own, product="9.9.9", **change)  # type: ignore[arg-type]
    with pytest.raises(VersionMismatch) as caught:
        check_peer(peer, "worker a")
    message = str(caught.value)
    assert message.startswith(f"{cause}: worker a runs {peer}")
    assert str(own) in message
    assert str(peer) != str(own)
    assert "\n" not in message


def test_another_release_or_minor_version_of_the_same_schema_is_fine() -> None:
    check_peer(replace(own_version(), product="9.9.9", protocol_minor=77), "worker a")


@given(st.text(max_size=20), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.binary(max_size=32))
def test_versions_come_back(product: str, major: int, minor: int, digest: bytes) -> None:
    version = Version(product, major, minor, digest)
    assert version_from_message(version_to_message(version)) == version


@given(
    st.builds(
        StageSettings,
        max_rows=st.integers(1, MAX_ROWS),
        max_seqs=st.integers(1, MAX_ROWS),
        max_logit_rows=st.integers(1, MAX_ROWS),
        max_context=st.integers(1, 2**24),
        kv_dtype=st.sampled_from(KV_DTYPES),
        wire_dtype=st.sampled_from(WIRE_DTYPES),
    )
)
def test_settings_come_back_with_the_same_digest(settings: StageSettings) -> None:
    back = settings_from_message(wpb.StageSettings.FromString(settings_to_message(settings).SerializeToString()))
    assert back == settings
    assert back.digest() == settings.digest()


CHANGES = {
    "max_rows": 513,
    "max_seqs": 65,
    "max_logit_rows": 65,
    "max_context": 8193,
    "kv_dtype": "q8_0",
    "wire_dtype": "bf16",
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_changes_the_digest(name: str) -> None:
    """B-44: one field at a time."""
    settings = StageSettings()
    assert replace(settings, **{name: CHANGES[name]}).digest() != settings.digest()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wire_dtype": 9}, "wire dtype code 9"),
        ({"wire_dtype": 0}, "wire dtype code 0"),
        ({"block_tokens": 32}, "block_tokens is 32"),
        ({"kv_dtype": "int3"}, "'int3'"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_rows": 65536}, "max_rows must be between 1 and 65535, got 65536"),
        ({"max_seqs": 2**32 - 1}, "max_seqs"),
        ({"max_context": 2**24 + 1}, "max_context"),
        ({"cuda_graphs": "perhaps"}, "'perhaps'"),
    ],
)
def test_settings_out_of_range(change: dict[str, object], said: str) -> None:
    message = settings_to_message(StageSettings())
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(InvalidConfig, match=said):
        settings_from_message(message)


def test_a_device_comes_back_without_types_that_we_do_not_know() -> None:
    profile = DeviceProfile(
        id=DeviceId(WorkerName("a"), 1),
        kind="cuda",
        name="GTX 1080 Ti",
        total_bytes=11 << 30,
        free_bytes=2**63 + 1,
        kernel="dp4a",
        compute_dtype="f32",
        kv_dtypes=("f16", "q8_0"),
        graphs=True,
        threads=3,
        weight_bits={GgmlType.Q4_K: 4.625, GgmlType.F32: 32.0},
        health=DeviceHealth(3, 4, 4, 16, 61.5, 118.25, 1800, 5005, 0.75),
    )
    message = device_to_message(profile)
    message.weight_bits[999] = 1.0
    answer = wpb.DescribeResponse(worker="a", devices=[message])
    assert worker_from_message(wpb.DescribeResponse.FromString(answer.SerializeToString())).devices == (profile,)


def test_what_a_stage_says_of_its_recordings() -> None:
    """C-15: every count travels, vetoes by reason."""
    counts = GraphCounts(3, 1000, 1, 2, 7 << 20, {"not faster": 4, "step too large": 9})
    message = wpb.LoadedStage(
        placement="p", num_layers=2, graphs=graphs_to_message(counts), compute_dtype="bf16",
        num_prefill_steps=4, prefill_busy_s=0.5, link_bytes=5 << 32, link_queue_depth=6, link_kind="grpc",
    )  # fmt: skip
    answer = wpb.DescribeResponse(worker="a", stages=[message])
    (stage,) = worker_from_message(wpb.DescribeResponse.FromString(answer.SerializeToString())).stages
    assert (stage.graphs, stage.compute_dtype) == (counts, "bf16")
    assert (stage.num_prefill_steps, stage.prefill_busy_s) == (4, 0.5)
    assert (stage.link_bytes, stage.link_queue_depth, stage.link_kind) == (5 << 32, 6, "grpc")
    assert worker_from_message(answer).devices == ()
