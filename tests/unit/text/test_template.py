"""The environment of chat templates: what published ones use works, what hostile ones try does not."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import pytest

from lamina.coordinator.text.template import ChatTemplate
from lamina.coordinator.text.tokenizer import Tokenizer
from lamina.spec.errors import InvalidCheckpoint, InvalidRequest

MakeTokenizer = Callable[..., Tokenizer]

HELLO: Sequence[Mapping[str, object]] = ({"role": "user", "content": "Hello"},)


def render(source: str, messages: Sequence[Mapping[str, object]] = HELLO, **kwargs: object) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, **kwargs)  # type: ignore[arg-type]


def test_smollm2_template(smollm2: Tokenizer, smollm2_metadata: Mapping[str, object]) -> None:
    """The model's own template adds its system message; closed conversations get no opening of an answer."""
    template = ChatTemplate.from_metadata(smollm2_metadata, smollm2, "SmolLM2")
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    frame = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    assert not template.is_default
    assert template.render(HELLO) == frame + "<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == frame


def test_a_file_without_a_template_gets_chatml(make_tokenizer: MakeTokenizer) -> None:
    """The stand-in says that it is one."""
    template = ChatTemplate.from_metadata({}, make_tokenizer(), "f.gguf")
    assert template.is_default
    assert template.render(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"


def test_blocks_leave_no_white_space() -> None:
    """trim_blocks and lstrip_blocks, as templates are written for."""
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend\n"
    assert render(source) == "Hello\nend"


def test_helpers_of_published_templates() -> None:
    """Loop controls, generation blocks, plain JSON, special tokens, and the date from the given clock."""
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHellob"
    assert render("{{ bos_token }}{{ eos_token }}") == "<s></s>"
    assert render("{{ x | tojson }}", x={"b": "<é>'", "a": 1}) == '{"b": "<é>\'", "a": 1}'
    assert render("{{ x | tojson(indent=1, sort_keys=True) }}", x={"b": 1, "a": 2}) == '{\n "a": 2,\n "b": 1\n}'
    clock = ChatTemplate("{{ strftime_now('%d %b %Y') }}", "", "", now=lambda: datetime(2026, 10, 3))
    assert clock.render(HELLO) == "03 Oct 2026"


def test_tools_and_variables_reach_the_template() -> None:
    """`tools` is None, not missing, where a request has none; templates test for both."""
    source = "{% if tools is none %}none{% else %}{{ tools[0].name }}{% endif %}{{ ' thinks' if enable_thinking }}"
    assert render(source) == "none"
    assert render(source, tools=[{"name": "clock"}], enable_thinking=True) == "clock thinks"


def test_a_refusal_is_one_line() -> None:
    """raise_exception's reason reaches the caller, on one line and not without end."""
    with pytest.raises(InvalidRequest, match=r"^the chat template refuses these messages: roles must alternate$"):
        render("{{ raise_exception('roles must\n   alternate') }}")
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception('x' * 5000) }}")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.text }}",
        "{{ nothing() }}",
        "{{ 1 / 0 }}",
        "{{ messages | map(attribute='x.y') | join | tojson | int + nothing }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for m in messages %}{{ m.content.encode('ascii', 1) }}{% endfor %}",
    ],
)
def test_whatever_a_template_raises_is_an_invalid_request(source: str) -> None:
    """C-17: a template that fails on these messages fails this request, not the coordinator."""
    with pytest.raises(InvalidRequest, match=r"^the chat template refuses these messages: .+$"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ (messages | map('attr', '__class__') | list)[0].__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='x') }}",
        "{{ messages[0].pop('content') }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    """A stranger's template reaches neither Python's internals nor the caller's messages."""
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(InvalidRequest):
        render(source, messages)
    assert messages == [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "expression", ["''['__class__']", "raise_exception.__globals__", "strftime_now.__code__", "''|attr('__class__')"]
)
def test_the_sandbox_shows_nothing(expression: str) -> None:
    """Attributes of Python's internals are undefined: printed as nothing."""
    assert render("[{{ " + expression + " }}]") == "[]"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 1000000000000 }}",
        "{{ 1000000000000 * 'x' }}",
        "{{ ([0] * 1000000000000) | length }}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 2 ** 1000 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}aaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
    ],
)
def test_bombs_do_not_go_off(source: str) -> None:
    """A few characters of template cannot fill the memory: operators, ranges and the output are bounded."""
    with pytest.raises(InvalidRequest):
        render(source)


def test_operators_still_work_within_their_bounds() -> None:
    """The bounds touch no honest template."""
    assert render("{{ '=' * 3 }}{{ 3 * '-' }}{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 6 * 7 + 1 }}{{ 2 ** 10 }}") == (
        "===---ab[1, 2]431024"
    )


def test_output_is_bounded_exactly() -> None:
    """At the bound it is printed, one more is refused."""
    template = ChatTemplate("{{ messages[0].content }}", "", "", max_output_chars=5)
    assert template.render(HELLO) == "Hello"
    with pytest.raises(InvalidRequest, match="prints more than 5 characters"):
        template.render([{"role": "user", "content": "Hello!"}])


def test_a_template_that_does_not_compile_names_file_and_line() -> None:
    """The file is at fault, not the request."""
    with pytest.raises(InvalidCheckpoint, match=r"^f\.gguf: tokenizer\.chat_template, line 2: .*endif.*") as caught:
        ChatTemplate("ok\n{% endif %}", "", "", where="f.gguf: tokenizer.chat_template")
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidCheckpoint, match="nested too deeply"):
        ChatTemplate("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "", "")
