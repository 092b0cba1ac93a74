"""Clients, an evaluation harness and a load tool as pip installs them (`make test-clients`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import tokenizers
import torch
from transformers import PreTrainedModel

from cflow.engine.base.errors import ModelError
from cflow.engine.files import hub
from harness.servers import Server, serving
from oracles import gguf_model
from oracles.model_file import ModelFile
from oracles.real_models import RealModel

HERE = Path(__file__).parent / "clients"
PROGRAMS = Path(__file__).parents[2] / "build" / "clients" / "bin"
pytestmark = pytest.mark.skipif(
    not (PROGRAMS / "lm_eval").exists(), reason="`make test-clients` sets up build/clients"
)

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
    "OPENAI_API_KEY": "none",
}
FLAGS = ("--context", "2048", "--max-sequences", "8")
ENDS_S = 240.0  # imports alone take half a minute on busy cores
N_CHOICES, N_STORIES, N_NEW = 4, 8, 16


def run(program: str, *arguments: str | Path, home: Path) -> str:
    """What it prints; home: for its caches."""
    environment = os.environ | OFFLINE | {"HF_HOME": str(home), "XDG_CACHE_HOME": str(home)}
    done = subprocess.run(
        [PROGRAMS / program, *arguments],
        capture_output=True, text=True, check=False, timeout=ENDS_S, env=environment, cwd=home,
    )  # fmt: skip
    print(done.stdout[-8000:], done.stderr[-8000:])
    assert done.returncode == 0
    return done.stdout


# ---- client libraries ----


@pytest.fixture(scope="module")
def caller() -> Iterator[Server]:
    """A model that knows tools."""
    try:
        model = hub.resolve("qwen2.5-coder-0.5b")
    except ModelError as error:
        pytest.skip(f"no model: {error}")
    with serving(model, *FLAGS) as server:
        yield server


@pytest.mark.parametrize("script", ["ask_litellm.py", "ask_langchain.py"])
def test_client_libraries(caller: Server, script: str, tmp_path: Path) -> None:
    printed = run("python", HERE / script, caller.url, home=tmp_path)
    found = json.loads(printed.splitlines()[-1])
    whole = caller.chat("Name three colours.", max_tokens=16)
    (choice,) = whole["choices"]
    text = choice["message"]["content"]
    assert text == found["whole"] == found["streamed"] == found["later"]
    assert found["reason"] == choice["finish_reason"]
    assert found["usage"] == whole["usage"]["completion_tokens"]
    assert found["text"] == caller.complete("1 2 3 4", max_tokens=6)["choices"][0]["text"]
    assert found["call"]["name"] == "get_weather"
    assert "Paris" in found["call"]["arguments"]["city"]
    if script == "ask_litellm.py":
        jsonschema.validate(found["formed"], {"type": "object", "required": ["city"]})
        assert found["unknown"] == "NotFoundError"
        assert found["long"] == "ContextWindowExceededError"
    else:
        assert found["many"][0] == text
        assert found["told"] == f"It rains in {found['call']['arguments']['city']}."
        for method in ("json_schema", "function_calling"):
            assert ("Ada" in found[method]["name"], found[method]["age"]) == (True, 36)


# ---- lm-eval ----


class Story(NamedTuple):
    """context: its beginning; choices: what may come next, the first sentences of others too."""

    context: str
    choices: list[str]
    gold: int


def stories(text: str) -> list[Story]:
    """Sentences 1 to 4 of a story, sentence 5 of it and of the three behind it."""
    told = [" ".join(t.split()) for t in text.split("Once upon a time")[1:]]
    cut = [re.findall(r"[^.!?]+[.!?]\"?", f"Once upon a time{t}") for t in told if len(t) > 300]
    cut = [sentences for sentences in cut if len(sentences) > 5][: N_STORIES + N_CHOICES]
    found = []
    for i in range(N_STORIES):
        nexts = [sentences[4].rstrip() for sentences in cut[i : i + N_CHOICES]]
        gold = i % N_CHOICES
        nexts[0], nexts[gold] = nexts[gold], nexts[0]
        found.append(Story("".join(cut[i][:4]), nexts, gold))
    return found


class Oracle:
    """SmolLM2 in f32, its weights dequantised by the gguf package, its tokenizer by tokenizers."""

    def __init__(self, model: RealModel) -> None:
        self._model: PreTrainedModel = gguf_model.load(model.gguf)
        self._tokenizer = tokenizers.Tokenizer.from_str(ModelFile(model.cflow).tokenizer)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Of what follows each token, [tokens, vocabulary]."""
        with torch.no_grad():
            return torch.log_softmax(self._model(torch.tensor([ids])).logits[0].double(), dim=-1)

    def score(self, before: list[int], after: list[int]) -> float:
        scores = self.logprobs(before + after)[len(before) - 1 : -1]
        return float(scores[range(len(after)), after].sum())

    def go_on(self, text: str) -> str:
        """Greedily, to the end of the sentence."""
        ids = torch.tensor([self.encode(text)])
        with torch.no_grad():
            told = self._model.generate(
                ids, do_sample=False, max_new_tokens=N_NEW, eos_token_id=[0, 2], pad_token_id=0,
                attention_mask=torch.ones_like(ids),
            )  # type: ignore[operator]  # fmt: skip
        new: str = self._tokenizer.decode(
            told[0, ids.shape[1] :].tolist(), skip_special_tokens=True
        )
        return new.split(".")[0]

    def regret(self, text: str, more: str) -> float:
        """How much less likely than the best a token of `more` is, the worst of them."""
        before, after = self.encode(text), self.encode(more)
        scores = self.logprobs(before + after)[len(before) - 1 : -1]
        return float((scores.max(dim=-1).values - scores[range(len(after)), after]).max())


class Bench(NamedTuple):
    """What lm-eval is given, and what must come of it. scores, lengths: log-likelihoods and tokens of
    each choice of each story; endings: how each goes on."""

    folder: Path
    stories: list[Story]
    scores: list[list[float]]
    lengths: list[list[int]]
    endings: list[str]
    oracle: Oracle


TASKS: dict[str, dict[str, Any]] = {
    "next_sentence": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    },
    "go_on": {
        "output_type": "generate_until",
        "doc_to_target": "{{ending}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": N_NEW, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def real() -> RealModel:
    return RealModel.fetch("smollm2-135m")


@pytest.fixture(scope="module")
def bench(real: RealModel, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder, oracle = tmp_path_factory.mktemp("tasks"), Oracle(real)
    found = stories((data / "tinystories" / "valid.txt").read_text())
    scores: list[list[float]] = []
    lengths: list[list[int]] = []
    for story in found:
        before = oracle.encode(story.context)
        after = [oracle.encode(story.context + choice)[len(before) :] for choice in story.choices]
        scores.append([oracle.score(before, ids) for ids in after])
        lengths.append([len(ids) for ids in after])
    endings = [oracle.go_on(story.context) for story in found]
    lines = [
        json.dumps(story._asdict() | {"ending": ending})
        for story, ending in zip(found, endings, strict=True)
    ]
    (folder / "stories.jsonl").write_text("\n".join(lines))
    for name, fields in TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "stories.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{context}}",
            "target_delimiter": "",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task | fields))  # JSON is YAML
    return Bench(folder, found, scores, lengths, endings, oracle)


@pytest.fixture(scope="module")
def tokenizer_folder(real: RealModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model file's tokenizer as transformers loads it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(ModelFile(real.cflow).tokenizer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def evaluate(
    server: Server, bench: Bench, out: Path, *, batch_size: int = 1, **how: Any
) -> tuple[Any, dict[str, Any]]:
    """lm-eval's results by task, and the answers to its requests by document."""
    options = {"model": "M", "base_url": f"{server.url}/v1/completions", "max_length": 2048} | how
    run(
        "lm_eval", "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in options.items()),
        "--batch_size", str(batch_size), "--tasks", ",".join(TASKS), "--include_path", bench.folder,
        "--output_path", out / "results", "--log_samples", home=out,
    )  # fmt: skip
    (results,) = (out / "results").rglob("results_*.json")
    answers = {}
    for name in TASKS:
        (path,) = (out / "results").rglob(f"samples_{name}_*.jsonl")
        samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda s: s["doc_id"])
        answers[name] = [sample["filtered_resps"] for sample in samples]
    return json.loads(results.read_text())["results"], answers


class Bounds(NamedTuple):
    """error: of a log-likelihood, a token. regret: of a token of a greedy text, by f32. apart: stories
    of which the score differs. equal: texts that are the very same, of all."""

    error: float
    regret: float
    apart: int
    equal: float


BOUNDS = {"int8": Bounds(0.15, 0.2, 1, 0.4), "f32": Bounds(1e-4, 1e-3, 0, 1.0)}


@pytest.mark.parametrize("precision", BOUNDS)
def test_lm_eval_scores_as_an_f32_forward_does(
    precision: str, real: RealModel, bench: Bench, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """f32: all but equal. int8: within what 8-bit activations cost."""
    how: dict[str, Any] = {"num_concurrent": 4}  # and the server's own tokenizer
    if precision == "f32":
        how = {"batch_size": 4, "tokenizer_backend": "huggingface", "tokenizer": tokenizer_folder}
    with serving(real.cflow, *FLAGS, "--precision", precision) as server:
        results, answers = evaluate(server, bench, tmp_path, **how)
    errors = [
        (float(answer[0]) - score) / n
        for given, scores, lengths in zip(
            answers["next_sentence"], bench.scores, bench.lengths, strict=True
        )
        for answer, score, n in zip(given, scores, lengths, strict=True)
    ]
    regrets = [
        bench.oracle.regret(story.context, text)
        for story, (text,) in zip(bench.stories, answers["go_on"], strict=True)
    ]
    picks = [scores.index(max(scores)) for scores in bench.scores]
    accuracy = sum(p == s.gold for p, s in zip(picks, bench.stories, strict=True)) / N_STORIES
    print(
        f"{precision}: largest error a token {max(map(abs, errors)):.5f}, regret {max(regrets):.4f},"
    )
    print(f"accuracy {accuracy} here, {results['next_sentence']['acc,none']} there,")
    print(f"exact match {results['go_on']['exact_match,none']}")
    assert 0.3 < accuracy < 1
    most, worst, apart, least = BOUNDS[precision]
    assert max(map(abs, errors)) <= most
    assert max(regrets) <= worst
    assert abs(results["next_sentence"]["acc,none"] - accuracy) <= apart / N_STORIES + 1e-9
    assert results["go_on"]["exact_match,none"] >= least


# ---- a load tool ----


def test_guidellm_loads_the_server_with_streams(
    shared: Server, tokenizer_folder: Path, tmp_path: Path
) -> None:
    n, n_prompt, n_answer = 24, 64, 32
    before = shared.metric("vllm:request_success_total", finished_reason="length")
    printed = run(
        "guidellm", "run",
        "--backend", f"kind=openai_http,target={shared.url}",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer_folder}",
        "--data", f"kind=synthetic_text,prompt_tokens={n_prompt},output_tokens={n_answer}",
        "--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={n}",
        "--output", f"kind=json,path={tmp_path / 'load.json'}", "--disable-console-interactive",
        home=tmp_path,
    )  # fmt: skip
    assert "Server Throughput Statistics" in printed
    (found,) = json.loads((tmp_path / "load.json").read_text())["benchmarks"]
    state = found["scheduler_state"]
    assert (state["successful_requests"], state["errored_requests"]) == (n, 0)
    cut = shared.metric("vllm:request_success_total", finished_reason="length")
    assert cut - before >= n  # each went on to its output_tokens
