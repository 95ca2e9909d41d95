"""How a sequence's next token is chosen: the parameters, with neutral defaults and their validation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lamina.spec.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one sequence; a default leaves the step it controls without effect.

    Order of application (B-31): logit_bias and penalties; argmax if temperature <= 0; top_n_sigma; temperature; top_k;
    typical_p; min_p; top_p; softmax and draw. Of equal logits a filter keeps the lowest ids; the draw adds
    probabilities up in order of id. Random numbers are Philox keyed by (seed, choice, output position).
    """

    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0  # 0 = off; keeps logit >= max - n * sigma (arXiv 2411.07641)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = -1  # tokens looked back by the penalties; -1 = the whole history
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    num_logprobs: int = -1  # -1 = none, 0 = of the chosen token only, n = and of the n most likely

    def num_looked_back(self, num_tokens: int, num_generated: int) -> int:
        """How many of a sequence's last tokens its penalties look at; `num_generated` of them are output."""
        looked = 0
        if self.repetition_penalty != 1.0:
            looked = num_tokens
        elif self.presence_penalty or self.frequency_penalty:
            looked = num_generated
        return looked if self.penalty_window < 0 else min(looked, self.penalty_window)

    def __post_init__(self) -> None:
        # Every limit is a float32, so what is within here still is once it has been rounded for the wire.
        checks = (
            (self.temperature >= 0, "temperature must be >= 0", self.temperature),
            (0 <= self.top_k < 2**32, "top_k must be in [0, 2**32) (0 = off)", self.top_k),
            (2**-30 <= self.top_p <= 1, "top_p must be in [2**-30, 1]", self.top_p),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p),
            (2**-30 <= self.typical_p <= 1, "typical_p must be in [2**-30, 1]", self.typical_p),
            (0 <= self.top_n_sigma <= 1e4, "top_n_sigma must be in [0, 10000] (0 = off)", self.top_n_sigma),
            (
                2**-14 <= self.repetition_penalty <= 2**14,
                "repetition_penalty must be in [2**-14, 2**14]",
                self.repetition_penalty,
            ),
            (-2 <= self.presence_penalty <= 2, "presence_penalty must be in [-2, 2]", self.presence_penalty),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty must be in [-2, 2]", self.frequency_penalty),
            (-1 <= self.penalty_window < 2**31, "penalty_window must be in [-1, 2**31)", self.penalty_window),
            (0 <= self.seed < 2**64, "seed must be in [0, 2**64)", self.seed),
            (-1 <= self.num_logprobs <= 20, "num_logprobs must be in [-1, 20]", self.num_logprobs),
        )
        for ok, rule, value in checks:  # a NaN fails every comparison, so it is refused as well
            if not ok:
                raise InvalidRequest(f"{rule}, got {value}")
        if any(not -100 <= bias <= 100 or not 0 <= token < 2**32 for token, bias in self.logit_bias.items()):
            raise InvalidRequest("logit_bias maps token ids >= 0 to values in [-100, 100]")
