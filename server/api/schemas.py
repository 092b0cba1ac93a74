"""Request bodies. Optional fields may be null; unknown fields are ignored and reported."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from cflow.engine.text.arguments import arguments_object
from cflow.server.errors import RequestError, shorten

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_SEED = 2**64 - 1
MAX_INT = 2**31 - 1
MAX_MESSAGES = 4096  # messages and tool calls together
MAX_BIASES = 4096
MAX_TOOLS = 128
OUR_FAULT = "cflow"  # type of errors whose message is ours
MAX_TEXT = 1 << 20  # characters for /tokenize, tokens for /detokenize


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _fault(text: str) -> PydanticCustomError:
    """The error of a BeforeValidator; `text` is the whole message."""
    return PydanticCustomError(OUR_FAULT, "{text}", {"text": text})


def _few_biases(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise _fault(f"{len(value)} entries; at most {MAX_BIASES} are allowed")
    return value


# Lists are bounded and stop at the first error: describing a million errors takes seconds.
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_as_list),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        default=None, description="with include_usage: every chunk says the usage so far"
    )


def _is_schema(value: object) -> object:
    if not isinstance(value, dict | bool):
        raise _fault(f"a schema is an object or a boolean, not {shorten(value)}")
    return value


def _is_schema_or_text(value: object) -> object:
    return value if isinstance(value, str) else _is_schema(value)


Schema = Annotated[Any, BeforeValidator(_is_schema)]
SchemaOrText = Annotated[Any, BeforeValidator(_is_schema_or_text)]


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Schema = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_BIASES, fail_fast=True)]


class StructuredOutputs(Body):
    """vLLM's structured_outputs: exactly one field must be set."""

    model_config = ConfigDict(extra="forbid")

    json_: SchemaOrText = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(default=None, description="Lark or GBNF")


PARSE_SPECIAL = (
    "text of the prompt or of messages that spells a special token becomes it; default: the server's "
    "settings, by default only in prompts"
)


class Sampling(Body):
    """Fields that completions and chats share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**63)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stops = Field(default=[])
    stop_token_ids: Annotated[list[int], Field(max_length=64, fail_fast=True)] = Field(default=[])
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_few_biases)] = Field(default={})
    moe_top_k: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="experts a token uses, at most the model's own number"
    )
    parse_special: bool | None = Field(default=None, description=PARSE_SPECIAL)
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        default=None,
        description="log-probabilities of the prompt's tokens, with this many alternatives; not in streams",
    )
    return_token_ids: bool = False
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] = Field(
        default=0, description="smaller goes first; with API keys at least 0"
    )
    timeout_s: Annotated[float, Field(gt=0, le=86400)] | None = Field(
        default=None, description="seconds after which the answer ends with the text so far"
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_progress: bool = Field(
        default=False, description="in a stream: chunks with prompt_progress"
    )
    timings_per_token: bool = Field(default=False, description="in a stream: timings in each chunk")

    # Clients send these; they have no effect here.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None


class CompletionRequest(Sampling):
    """POST /v1/completions. prompt: a string, token ids, or a list of either."""

    prompt: Any
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class FunctionCall(Body):
    name: str
    arguments: str = "{}"


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


def _join_parts(value: object) -> object:
    """Join text parts without a separator; reject any other kind of part by name."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _fault(f"content parts of type {shorten(kind)} are not supported; only 'text' is")
        if not isinstance(part.get("text"), str):
            raise _fault("a text part needs a string 'text'")
        texts.append(part["text"])
    return "".join(texts)


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_join_parts)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def _few_messages(value: object) -> object:
    """Count messages before validating them: validating a hundred thousand takes seconds."""
    if isinstance(value, list):
        calls = [m.get("tool_calls") for m in value if isinstance(m, dict)]
        n = len(value) + sum(len(c) for c in calls if isinstance(c, list))
        if n > MAX_MESSAGES:
            raise _fault(f"{n} messages and tool calls; at most {MAX_MESSAGES} are allowed")
    return value


Messages = Annotated[
    list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(_few_messages)
]
Text = Annotated[str, Field(max_length=MAX_TEXT)]


TOOL_NAME = r"^[a-zA-Z0-9_.:/-]{1,128}$"


class Function(Body):
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="changes nothing")


class Tool(Body):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**63)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})
    reasoning_effort: Effort | None = Field(
        default=None,
        description="none switches thinking off, anything else on, where the model can",
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(
        default=False, description="the answer goes on where the last message ends"
    )
    tools: Tools = Field(default=[])
    tool_choice: Any = Field(
        default="auto", description='"none", "auto", "required", or one tool by its name'
    )
    parallel_tool_calls: bool = True
    functions: Any = None
    function_call: Any = None


class TextConfig(Body):
    format: dict[str, Any] | None = None


def _is_input(value: object) -> object:
    if not isinstance(value, str | list):
        raise _fault(f"input is {shorten(value)}; it must be a text or a list of items")
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise _fault(f"{len(value)} items; at most {MAX_MESSAGES} are allowed")
    return value


class Reasoning(Body):
    effort: Effort | None = None


class ResponsesRequest(Sampling):
    """POST /v1/responses."""

    input: Annotated[Any, BeforeValidator(_is_input)] = Field(default=[])
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**63)] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default=[]
    )
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default={})
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] = Field(default=[])
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool = Field(default=True, description="keep the response for previous_response_id")
    conversation: Any = None
    background: Any = None
    prompt: Any = None

    reasoning: Reasoning | None = None

    @property
    def reasoning_effort(self) -> Effort | None:
        return self.reasoning.effort if self.reasoning else None

    # Clients send these; they have no effect here.
    truncation: Any = None


class Turn(Body):
    """A message of /v1/messages. content: a text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ThinkingConfig(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class MessagesRequest(Body):
    """POST /v1/messages, in Anthropic's shape."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=2**63)]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] = Field(
        default=[]
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default=[]
    )
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingConfig | None = None
    output_config: dict[str, Any] = Field(default={}, description="effort, format")
    output_format: dict[str, Any] | None = Field(
        default=None, description="older name of output_config.format"
    )
    stream: bool = False

    # Clients send these; they have no effect here.
    metadata: Any = None
    service_tier: Any = None
    cache_control: Any = None
    context_management: Any = None


class CountRequest(MessagesRequest):
    """POST /v1/messages/count_tokens."""

    max_tokens: Annotated[int, Field(ge=1, le=2**63)] = 1


class EmbeddingsRequest(Body):
    """POST /v1/embeddings. input: a string, token ids, or a list of either."""

    model: str | None = None
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None, description="the first so many, normalised again"
    )
    parse_special: bool | None = Field(default=None, description=PARSE_SPECIAL)
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] = Field(
        default=0, description="smaller goes first; with API keys at least 0"
    )
    timeout_s: Annotated[float, Field(gt=0, le=86400)] | None = None

    # Clients send it; it has no effect here.
    user: Any = None


class TokenizeRequest(Body):
    """POST /tokenize: content -> tokens; prompt or messages -> tokens, count, max_model_len."""

    model: str | None = None
    content: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special: bool = Field(default=False, description="with content: add BOS")
    add_special_tokens: bool = Field(default=True, description="with prompt: add BOS")
    parse_special: bool | None = Field(default=None, description=PARSE_SPECIAL)
    with_pieces: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default={})


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_TEXT, fail_fast=True)]


AnyBody = TypeVar("AnyBody", bound=Body)

# JSON schemas of nested shapes, by the names that the schemas of requests refer to.
REF = "#/components/schemas/{model}"
SHAPES: dict[str, Any] = {
    kind.__name__: {
        k: v for k, v in kind.model_json_schema(ref_template=REF).items() if k != "$defs"
    }
    for kind in (
        StreamOptions,
        ResponseFormat,
        JsonSchema,
        StructuredOutputs,
        Message,
        ToolCall,
        FunctionCall,
        Reasoning,
        Turn,
        ThinkingConfig,
        Tool,
        Function,
        TextConfig,
    )
}


def _path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text[:80]


def _explain(fault: ErrorDetails) -> RequestError:
    param = _path(fault["loc"])
    if fault["type"] == "missing":
        return RequestError(f"{param} is required.", code="missing_parameter", param=param)
    message = fault["msg"][:1].lower() + fault["msg"][1:]
    if fault["type"] != OUR_FAULT:
        message += f", not {shorten(fault['input'])}"
    return RequestError(f"{param}: {message}.", param=param)


def parse(kind: type[AnyBody], body: dict[str, Any]) -> AnyBody:
    """Validate a decoded JSON object without nulls. Raises RequestError for the first error."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from None


def ignored_header(
    kind: type[Body], body: dict[str, Any], ignored: Iterable[str] = ()
) -> dict[str, str]:
    """A header that tells the client which fields have no effect: {"x-cflow-ignored-params": "a,b"}.

    ignored: known fields among them."""
    unknown = (name for name in body if name not in kind.model_fields)
    names = ",".join(quote(name[:64], safe="") for name in islice(chain(ignored, unknown), 20))
    return {"x-cflow-ignored-params": names} if names else {}


def with_ignored(headers: dict[str, str], more: list[str]) -> dict[str, str]:
    """The headers of ignored_header() with more names."""
    names = [quote(name[:64], safe="") for name in dict.fromkeys(more)][:20]
    known = headers.get("x-cflow-ignored-params")
    names = [known, *names] if known else names
    return headers | ({"x-cflow-ignored-params": ",".join(names)} if names else {})


def render_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them. Missing content becomes ''."""
    return [_render_message(index, message) for index, message in enumerate(messages)]


def _render_message(index: int, message: Message) -> dict[str, Any]:
    if message.content is None and message.role != "assistant":
        param = f"messages[{index}].content"
        raise RequestError(f"{param} is required for role {message.role}.", param=param)
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.name is not None:
        out["name"] = message.name
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        out["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        out["tool_calls"] = [_render_call(call) for call in message.tool_calls]
    return out


def _render_call(call: ToolCall) -> dict[str, Any]:
    arguments = arguments_object(call.function.arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
