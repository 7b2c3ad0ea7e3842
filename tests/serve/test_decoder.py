"""The batched decoder gives the tokens of transformers' generate, whatever else is decoded at the same time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from modelwright.data.chat import build_prompt_messages
from modelwright.models.pretrained import load_model
from modelwright.serve.decoder import COMPILE_STEPS, Decoder
from modelwright.serve.generate import TextGenerator
from modelwright.serve.kv_cache import CompiledDecodeLayers, SharedCache, choose_cache, compiled_cache
from modelwright.serve.sampling import UNIFORMS, DecodeRequest, Sampler, SamplingParams
from zoo import Zoo, build

EOS = frozenset({2})
LENGTHS = (7, 40, 3, 21, 1, 33, 12)
"""Some are longer than the window of the tiny models, which is 16."""


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(3, 200) for _ in range(length)] for length in lengths]


def decode(decoder: Decoder, requests: list[DecodeRequest]) -> list[DecodeRequest]:
    decoder.submit(*requests)
    while not all(request.finished for request in requests):
        decoder.step()
    return requests


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The answer of transformers' generate to one prompt, without the token that ends it."""
    output = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens[: tokens.index(2)] if 2 in tokens else tokens


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "gpt2", "mixtral", "bloom", "lfm2"])
def test_greedy_tokens_are_those_of_generate(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    model = load_model(tmp_path).eval()
    expected = [greedy(model, prompt) for prompt in prompts()]
    caches = [choose_cache(model)] if name == "lfm2" else [choose_cache(model), SharedCache(model, static=True)]
    for cache in caches:
        assert type(cache) is SharedCache
        decoder = Decoder(model, cache, max_rows=3)
        requests = [DecodeRequest(prompt, SamplingParams(12), EOS) for prompt in prompts()]
        assert [request.token_ids for request in decode(decoder, requests)] == expected


@torch.no_grad()
def test_a_long_row_does_not_change_the_positions_of_others(tmp_path: Path) -> None:
    """longrope (Phi-3) takes other frequencies for a whole batch, and for a whole text, above a length."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 24}  # fmt: skip
    build("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=24)
    model = load_model(tmp_path).eval()
    expected = [list(prompt) for prompt in prompts()]
    for text in expected:
        for _ in range(12):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    requests = [DecodeRequest(prompt, SamplingParams(12), frozenset()) for prompt in prompts()]
    decode(Decoder(model), requests)
    assert [request.prompt + request.token_ids for request in requests] == expected


def test_a_bf16_model_is_decoded_in_batches(tmp_path: Path) -> None:
    """On an H200 a 4 B model of 36 layers was decoded row by row: rounding was taken for a wrong cache."""
    build("llama", tmp_path)
    model = load_model(tmp_path).eval().to(torch.bfloat16)
    assert type(choose_cache(model)) is SharedCache


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("llama")
    build("llama", folder)
    return load_model(folder).eval()


def sampled_requests(params: SamplingParams) -> list[DecodeRequest]:
    return [DecodeRequest(prompt, params, EOS, index) for prompt in prompts() for index in range(2)]


@pytest.mark.parametrize(
    "params", [SamplingParams(16, 1.0), SamplingParams(16, 0.8, top_p=0.9, top_k=40, seed=-3)], ids=["all", "top"]
)
def test_sampled_tokens_are_the_same_in_any_batch(llama: Any, params: SamplingParams) -> None:
    alone = decode(Decoder(llama, max_rows=1), sampled_requests(params))
    assert len({tuple(request.token_ids) for request in alone}) == len(alone), "each sample has its own random numbers"
    for max_rows, static in ((3, False), (32, False), (4, True)):
        requests = sampled_requests(params)
        decode(Decoder(llama, SharedCache(llama, static=static), max_rows=max_rows), requests[::-1])
        for request, reference in zip(requests, alone, strict=True):
            assert request.token_ids == reference.token_ids
            assert request.logprobs == pytest.approx(reference.logprobs, rel=1e-4, abs=1e-5)
    other = decode(Decoder(llama, max_rows=8), sampled_requests(replace(params, seed=7)))
    assert [request.token_ids for request in other] != [request.token_ids for request in alone]


def test_queries_keys_and_values_of_compiled_layers_are_parts_of_one_product(model_folder: Path) -> None:
    model = load_model(model_folder)
    layers = CompiledDecodeLayers(model)
    attention = model.model.layers[0].self_attn
    linears, inputs = (
        [attention.q_proj, attention.k_proj, attention.v_proj],
        torch.randn(3, 1, model.config.hidden_size),
    )
    expected = [linear(inputs) for linear in linears]
    with layers.use(None, [None] * len(model.model.layers)):  # type: ignore[list-item]
        parts = [linear(inputs) for linear in linears]
        assert {part.untyped_storage().data_ptr() for part in parts} == {parts[0].untyped_storage().data_ptr()}
    torch.testing.assert_close(parts, expected)
    torch.testing.assert_close([linear(inputs) for linear in linears], expected)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_compiled_layers_decode_the_tokens_of_generate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row and several are compiled, each for all layers of a kind and all lengths."""
    build(name, tmp_path, num_hidden_layers=3)
    model = load_model(tmp_path).eval()
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="eager"))  # inductor takes 20 s on a CPU
    torch._dynamo.reset()
    counters.clear()
    decoder = Decoder(model, SharedCache(model, static=True), max_rows=3)
    plain = decoder.cache
    decoder.compile_for(10)
    assert decoder.cache is plain, "not worth it"
    decoder.compile_for(COMPILE_STEPS)
    assert decoder.cache is not plain
    requests = [DecodeRequest(prompt, SamplingParams(12), EOS) for prompt in prompts((*LENGTHS, 250))]
    assert [request.token_ids for request in decode(decoder, requests)] == [
        greedy(model, prompt) for prompt in prompts((*LENGTHS, 250))
    ]
    assert counters["stats"]["unique_graphs"] == 2


def test_a_model_that_does_not_compile_is_decoded_without(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this does not compile")

    monkeypatch.setattr("torch.compile", lambda *args, **kwargs: refuse)
    cache = SharedCache(llama, static=True)
    assert compiled_cache(cache) is cache


def test_a_model_whose_fused_weights_do_not_fit_is_decoded_without(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("modelwright.serve.kv_cache._fused_projections", refuse)
    cache = SharedCache(llama, static=True)
    assert compiled_cache(cache) is cache


def test_a_capture_that_fails_costs_speed_only(
    llama: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    captures = []

    def capture(rows: int, width: int) -> Any:
        captures.append((rows, width))
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    cache = SharedCache(llama, static=True, graphs=True)
    monkeypatch.setattr(cache, "_capture", capture)
    requests = [DecodeRequest(prompt, SamplingParams(12), EOS) for prompt in prompts()]
    decode(Decoder(llama, cache), requests)
    assert [request.token_ids for request in requests] == [greedy(llama, prompt) for prompt in prompts()]
    assert len(captures) == 1 and capsys.readouterr().err == (
        "note: answers are decoded without CUDA graphs: operation not permitted when stream is capturing\n"
    )


def test_a_token_that_was_computed_too_early_is_dropped(llama: Any) -> None:
    """A static cache computes the next token of a row before the host has read the last one."""
    expected = decode(Decoder(llama), [DecodeRequest(prompt, SamplingParams(20), frozenset()) for prompt in prompts()])
    decoder = Decoder(llama, SharedCache(llama, static=True), max_rows=4)
    requests = [DecodeRequest(prompt, SamplingParams(20), frozenset()) for prompt in prompts()]
    for number, request in enumerate(requests):
        request.should_stop = lambda token, request=request, number=number: len(request.token_ids) == 3 + number
    decode(decoder, requests)
    for number, (request, reference) in enumerate(zip(requests, expected, strict=True)):
        assert request.token_ids == reference.token_ids[: 3 + number] and request.finish_reason == "stop"
        assert len(request.logprobs) == len(request.token_ids)


def test_the_random_numbers_of_a_row_are_one_sequence() -> None:
    request = DecodeRequest([1, 2, 3], SamplingParams(temperature=1.0), EOS, sample_index=2)
    once = request.uniforms(0, 3 * UNIFORMS)
    again = DecodeRequest([1, 2, 3], SamplingParams(temperature=1.0), EOS, sample_index=2)
    for first in (0, 5, UNIFORMS + 1, 3):
        assert again.uniforms(first, UNIFORMS).tolist() == once[first : first + UNIFORMS].tolist()


def test_a_sampled_answer_longer_than_its_random_numbers(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(20, 1.0, top_p=0.9)
    alone = decode(Decoder(llama, max_rows=1), [DecodeRequest(each, params, frozenset()) for each in prompts((4, 9))])
    monkeypatch.setattr("modelwright.serve.sampling.UNIFORMS", 8)
    together = [DecodeRequest(each, params, frozenset()) for each in prompts((4, 9))]
    decode(Decoder(llama, SharedCache(llama, static=True)), together)
    assert [request.token_ids for request in together] == [request.token_ids for request in alone]


def test_the_log_probs_are_those_of_a_forward_pass(llama: Any) -> None:
    [request] = decode(Decoder(llama), [DecodeRequest(prompts()[1], SamplingParams(12, 1.3), EOS)])
    tokens = torch.tensor([request.prompt + request.token_ids])
    with torch.no_grad():
        logps = llama(tokens).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
    expected = logps.gather(1, torch.tensor(request.token_ids)[:, None])[:, 0]
    assert request.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=1.0), (0.5, 0.3, 0.15, 0.05)),
        (SamplingParams(temperature=1.0, top_p=0.7), (0.625, 0.375, 0, 0)),
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.8), (0.625, 0.375, 0, 0)),
        (SamplingParams(temperature=1.0, top_k=3), (0.526, 0.316, 0.158, 0)),
        (SamplingParams(temperature=0.5), (0.685, 0.247, 0.062, 0.007)),
        (SamplingParams(temperature=2.0, top_k=1), (1, 0, 0, 0)),
    ],
)
def test_tokens_are_sampled_with_their_probability(params: SamplingParams, expected: tuple[float, ...]) -> None:
    requests = [DecodeRequest([1], params, EOS, index) for index in range(4000)]
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, 4)
    counts = Counter(Sampler(requests, logits.device)(logits)[0].tolist())
    assert [counts[token] / 4000 for token in range(4)] == pytest.approx(expected, abs=0.025)


def test_a_cancelled_request_frees_its_row(llama: Any) -> None:
    decoder = Decoder(llama, max_rows=1)
    first, second = (DecodeRequest(prompt, SamplingParams(200), frozenset()) for prompt in prompts()[:2])
    decoder.submit(first, second)
    decoder.step()
    assert first.token_ids and not second.token_ids
    first.cancelled = True
    decoder.step()
    assert len(first.token_ids) == 2 and second.token_ids


def test_an_error_ends_all_requests_and_none_that_come_later(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(llama)
    with monkeypatch.context() as patch:
        patch.setattr(decoder.cache, "forward", lambda tokens: torch.zeros(1).view(5))
        requests = decode(decoder, [DecodeRequest(prompt, SamplingParams(4), EOS) for prompt in prompts()])
    assert all(isinstance(request.error, RuntimeError) for request in requests)
    [request] = decode(decoder, [DecodeRequest(prompts()[0], SamplingParams(12), EOS)])
    assert request.error is None and request.token_ids == greedy(llama, prompts()[0])


def test_no_more_rows_than_memory(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelwright.serve.kv_cache.MAX_CACHE_BYTES", 100_000)
    decoder, most = Decoder(llama), 0
    requests = [DecodeRequest(prompt, SamplingParams(60), frozenset()) for prompt in prompts((30,) * 12)]
    decoder.submit(*requests)
    while not all(request.finished for request in requests):
        decoder.step()
        most = max(most, sum(0 < len(request.token_ids) < 60 for request in requests))
    assert 1 < most < 12 and all(len(request.token_ids) == 60 for request in requests)


def test_an_adapter_is_applied(tmp_path: Path) -> None:
    zoo = Zoo("llama", tmp_path)
    model = zoo.adapted()
    model.save_pretrained(tmp_path / "adapter")
    zoo.tokenizer.save_pretrained(tmp_path / "adapter")
    generator = TextGenerator(tmp_path / "adapter", max_new_tokens=12)
    messages = [build_prompt_messages(question, None) for question in ("Why?", "How far is it to the tent?")]
    expected = [greedy(zoo.adapted().merge_and_unload(), generator._tokenize(each)) for each in messages]
    assert [completion.token_ids for [completion] in generator.completions(messages)] == expected


def test_several_samples_of_each_prompt(loud_model: Path) -> None:
    generator = TextGenerator(loud_model)
    messages = [build_prompt_messages(question, None) for question in ("Why?", "When?")]
    samples = generator.completions(messages, SamplingParams(8, 1.5, seed=1), num_samples=3)
    assert [len(answers) for answers in samples] == [3, 3]
    assert len({answer.text for answers in samples for answer in answers}) > 3
    assert all(len(answer.token_ids) == len(answer.logprobs) for answers in samples for answer in answers)
    again = generator.completions(messages[1:], SamplingParams(8, 1.5, seed=1), num_samples=2)
    assert [answer.text for answer in again[0]] == [answer.text for answer in samples[1][:2]]


def test_a_prompt_that_leaves_no_room_gets_no_answer(loud_model: Path) -> None:
    messages = [build_prompt_messages("word " * 300, None), build_prompt_messages("Why?", None)]
    [[empty], [answer]] = TextGenerator(loud_model, max_new_tokens=4).completions(messages)
    assert (empty.text, empty.finish_reason) == ("", "length") and answer.text
