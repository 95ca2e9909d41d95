"""Rotary frequencies of a RopeSpec, computed once at load in float64."""

import math

import numpy as np
from numpy.typing import NDArray

from lamina.spec.model import LinearScaling, NoScaling, RopeSpec, YarnScaling


def inverse_frequencies(rope: RopeSpec, factors: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """theta_i for i < dims/2, float32 [dims/2]: base^(-2i/dims), divided by `factors`, then scaled.

    Linear scaling divides by the factor; YaRN (Peng et al. 2023) blends both by wavelength.
    """
    half = rope.dims // 2
    theta = rope.freq_base ** (-2.0 * np.arange(half, dtype=np.float64) / rope.dims)
    if factors is not None:
        theta = theta / factors.astype(np.float64)
    match rope.scaling:
        case NoScaling():
            scaled = theta
        case LinearScaling(factor):
            scaled = theta / factor
        case YarnScaling() as yarn:
            ramp = _yarn_ramp(rope, yarn) * yarn.ext_factor
            scaled = theta / yarn.factor * (1 - ramp) + theta * ramp
    return scaled.astype(np.float32)


def rope_magnitude(rope: RopeSpec) -> float:
    """Factor on cos and sin: 1, or YaRN's attention factor (1 + 0.1 ln s) times the model's own."""
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.ext_factor != 0:
        return rope.scaling.attn_factor * (1 + 0.1 * math.log(rope.scaling.factor))
    return rope.scaling.attn_factor if isinstance(rope.scaling, YarnScaling) else 1.0


def _yarn_ramp(rope: RopeSpec, yarn: YarnScaling) -> NDArray[np.float64]:
    """1 where a dimension keeps its own angle, 0 where it is interpolated, linear between."""

    def correction(rotations: float) -> float:
        wavelengths = yarn.original_context / (2 * math.pi * rotations)
        return rope.dims * math.log(wavelengths) / (2 * math.log(rope.freq_base))

    low = max(0, math.floor(correction(yarn.beta_fast)))
    high = min(rope.dims - 1, math.ceil(correction(yarn.beta_slow)))
    index = np.arange(rope.dims // 2, dtype=np.float64)
    return np.asarray(1 - np.clip((index - low) / max(0.001, high - low), 0, 1))
