"""The Triton kernels of the decoder compute what plain torch computes."""

from __future__ import annotations

import pytest
import torch

from modelwright.models.decode_attention import decode_attention
from modelwright.serve.sampling import DecodeRequest, Sampler, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run by hand on a GPU machine"),
]


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "width", "depth"),
    [(32, 32, 8, 512, 128), (1, 16, 4, 700, 128), (3, 8, 8, 300, 64), (2, 8, 1, 300, 256), (4, 12, 4, 130, 80)],
)
def test_attention(rows: int, heads: int, groups: int, width: int, depth: int) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        keys, values = torch.randn(2, rows, groups, width + 8, depth).bfloat16()[..., :width, :]
        query = torch.randn(rows, heads, depth).bfloat16()
        mask = torch.arange(width) >= torch.randint(0, width, (rows, 1))
    expected = decode_attention(query.float(), keys.float(), values.float(), mask, 0.1, kernel=False)
    gap = (decode_attention(query, keys, values, mask, 0.1, kernel=True) - expected).abs().max() / expected.abs().max()
    assert gap < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    choices = [(t, p, k) for t in (0.0, 0.7, 1.5) for p in (1.0, 0.95, 0.3, 1e-6) for k in (0, 1, 40)]
    params = [SamplingParams(temperature=t, top_p=p, top_k=k) for t, p, k in choices]
    requests = [DecodeRequest([1, 2], each, frozenset(), index) for index, each in enumerate(params)]
    for logits in (torch.randn(len(params), 50_257) * 3, (torch.randn(len(params), 1000) * 3).round()):
        tokens, logprobs = Sampler(requests, torch.device("cpu"))(logits.to(dtype))
        cuda_tokens, cuda_logprobs = Sampler(requests, torch.device("cuda"), kernel=True)(logits.to(dtype).cuda())
        equal = tokens == cuda_tokens.cpu()
        assert equal.sum() >= len(params) - 1, "rounding changes one in thousands"
        assert torch.allclose(logprobs[equal], cuda_logprobs.cpu()[equal], atol=1e-4)
