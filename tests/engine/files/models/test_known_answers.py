"""Answers of real models that are known token for token."""

import jinja2
import tokenizers

from oracles import running
from oracles.model_file import ModelFile
from oracles.real_models import RealModel

QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = [785, 6722, 315, 9625, 374, 12095, 13]  # The capital of France is Paris.


def test_qwen_names_the_capital_of_france() -> None:
    """Through the int8 path, with the template of the model's own file."""
    path = RealModel.fetch("qwen2.5-coder-0.5b").cflow
    file = ModelFile(path)
    template = jinja2.Environment().from_string(file.metadata["chat_template"])
    messages = [{"role": "user", "content": QUESTION}]
    text = template.render(messages=messages, add_generation_prompt=True)
    prompt = tokenizers.Tokenizer.from_str(file.tokenizer).encode(text).ids
    with running.opened(path) as context:
        answer = running.greedy(context, prompt, len(ANSWER) + 1)
    assert answer[:-1] == ANSWER
    assert answer[-1] in file.metadata["eos_ids"]
