"""The model that is served, as the API sees it: name, text handling, limits. Never changes."""

from dataclasses import dataclass

from lamina.coordinator.api.errors import ApiError
from lamina.coordinator.api.reasoning import thinks
from lamina.coordinator.api.tools import ToolFormat, format_of
from lamina.coordinator.text.chat import ChatEncoder
from lamina.coordinator.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`max_context` bounds prompt and output of one sequence together, in tokens, of the `model_context` that the model
    was made for; `created_s` is Unix time.
    """

    id: str
    tokenizer: Tokenizer
    chat: ChatEncoder
    max_context: int
    model_context: int
    created_s: int

    @property
    def tool_format(self) -> ToolFormat:
        """How this family writes tool calls."""
        return format_of(self.chat.template.source)

    @property
    def template_knows_tools(self) -> bool:
        """Whether the chat template prints tools itself."""
        return "tools" in self.chat.template.source

    @property
    def thinks(self) -> bool:
        """Whether this model writes its thoughts before its answer."""
        return thinks(self.chat.template.source)

    def check_name(self, name: str | None) -> None:
        """Raise ApiError 404 unless `name` is this model's or left out."""
        if name is not None and name != self.id:
            raise ApiError(
                404, f"model {name!r} is not served here; {self.id!r} is", code="model_not_found", param="model"
            )
