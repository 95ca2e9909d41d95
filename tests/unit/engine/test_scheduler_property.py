"""Any order of arrivals, cancellations, stage progress, answers and lost epochs, on small pools and tight limits."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.spec.ids import SeqId
from support.sim_engine import SimEngine, request
from support.sim_pipeline import VOCAB

MAX_CONTEXT = 96


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    num_groups = draw(st.integers(1, 3))
    windows: tuple[int | None, ...] = ()
    if num_groups > 1 and draw(st.booleans()):
        windows = tuple(draw(st.permutations([None, *(draw(st.integers(1, 50)) for _ in range(num_groups - 1))])))
    return SchedulerConfig(
        num_stages=draw(st.integers(1, 4)),
        max_rows=draw(st.integers(1, 80)),
        max_seqs=draw(st.integers(1, 6)),
        max_logit_rows=draw(st.integers(1, 6)),
        max_context=MAX_CONTEXT,
        num_blocks=tuple(draw(st.integers(4, 16)) for _ in range(num_groups)),
        windows=windows,
        admission=draw(st.sampled_from(["optimistic", "optimistic", "reserve"])),
        policy=draw(st.sampled_from(["fcfs", "spf"])),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        prefill_chunk_tokens=draw(st.integers(1, 64)),
        pipeline_width=draw(st.one_of(st.none(), st.floats(1.0, 4.0))),
        min_prefill_rows=draw(st.integers(1, 40)),
        step_cost_rows=draw(st.integers(1, 20)),
        run_ahead=draw(st.integers(1, 4)),
    )


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Often the beginning of one of few texts, so that prefixes are shared, whole blocks and parts of them."""
    family = draw(st.sampled_from([1, 3]))
    text = [1 + (i * i * family) % (VOCAB - 1) for i in range(MAX_CONTEXT)]
    tail = draw(st.lists(st.integers(1, VOCAB - 1), max_size=3))
    return tuple(text[: draw(st.integers(1, 60))] + tail)


class ServingMachine(RuleBasedStateMachine):
    """A-41, A-44, A-45, B-11, B-21: conservation, one writer, nobody starves, outputs equal the reference."""

    @initialize(config=configs())
    def begin(self, config: SchedulerConfig) -> None:
        self.engine = SimEngine(config)

    @rule(
        prompt=prompts(),
        max_tokens=st.integers(1, 40),
        salt=st.sampled_from(["", "", "tenant"]),
        stop_ids=st.sampled_from([(), (3, 7, 11)]),
    )
    def arrive(self, prompt: tuple[int, ...], max_tokens: int, salt: str, stop_ids: tuple[int, ...]) -> None:
        if len(prompt) <= self.engine.scheduler.capacity_tokens:
            self.engine.add(request(prompt, max_tokens, salt=salt, stop_ids=stop_ids))

    @precondition(lambda self: self.engine.requests)
    @rule(pick=st.integers(0, 2**16))
    def cancel(self, pick: int) -> None:
        ids = list(self.engine.requests)
        self.engine.cancel(ids[pick % len(ids)])

    @rule(seq=st.integers(0, 12))
    def poison(self, seq: int) -> None:
        self.engine.pipeline.nonfinite.add(SeqId(seq))

    @rule(count=st.integers(1, 3))
    def issue(self, count: int) -> None:
        for _ in range(count):
            self.engine.issue()

    @rule(index=st.integers(0, 3))
    def run_stage(self, index: int) -> None:
        self.engine.pipeline.run_stage(index % self.engine.scheduler.config.num_stages)

    @precondition(lambda self: self.engine.pipeline.feedback)
    @rule()
    def deliver_feedback(self) -> None:
        self.engine.pipeline.deliver_feedback()

    @precondition(lambda self: self.engine.pipeline.answers)
    @rule()
    def absorb(self) -> None:
        self.engine.absorb()

    @rule(count=st.integers(1, 12))
    def serve(self, count: int) -> None:
        """The usual course of things, so that runs come far."""
        for _ in range(count):
            self.engine.issue_all()
            self.engine.run_stages()
            if self.engine.pipeline.answers:
                self.engine.absorb()

    @rule(changed=st.one_of(st.none(), st.none(), configs()))
    def lose_epoch(self, changed: SchedulerConfig | None) -> None:
        self.engine.restart(changed)

    @invariant()
    def blocks_are_conserved(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_blocks()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        positions = sum(len(wanted.prompt_ids) + wanted.max_tokens for wanted in self.engine.requests.values())
        self.engine.drain(max_steps=100 + 20 * positions)
        self.engine.check_outputs()
        self.engine.check_blocks()
        self.engine.check_idle()


TestServing = ServingMachine.TestCase
TestServing.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
