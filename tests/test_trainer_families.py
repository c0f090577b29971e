"""Every model family: megatron's model is transformers' model, the embedded engine's too, and weights go between them bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from palestra.server.embedded.core import Core
from palestra.server.embedded.model import load_model
from palestra.server.embedded.types import EngineOptions, GenerateCall, ModelRefused
from palestra.trainer.losses import nll_loss
from palestra.trainer.megatron import convert
from palestra.trainer.megatron.backend import BackendSettings, MegatronBackend
from palestra.trainer.megatron.families import architecture_of, read_config
from palestra.trainer.megatron.optimizer import OptimSettings
from palestra.trainer.types import Backend, ModelError, TrainerError
from tests.conformance.backend_suite import (
    BETAS,
    CLIP,
    DECAY,
    EPS,
    LR,
    BackendSuite,
    MakeBackend,
    batches_of,
    exported,
    hf_model,
    micro_batch,
    reference_logprobs,
    sample_rows,
)
from tests.conformance.engine_kit import full_forward
from tests.tiny import FAMILIES, make_tiny_family

EXACT, LAW = 1e-5, 1e-4
ROUTER_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: make_tiny_family(root / family, family) for family in FAMILIES}


def backend_of(folder: Path, megatron: Mapping[str, Any] | None = None, *, chunk: int = 0) -> MegatronBackend:
    optim = OptimSettings(weight_decay=DECAY, betas=BETAS, eps=EPS, clip_grad=CLIP)
    return MegatronBackend.from_folder(
        folder, BackendSettings(optim=optim, logprob_chunk=chunk, megatron=megatron or {})
    )


def gradients(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """Of every trained tensor, under its Hugging Face name."""
    named = {name: each for name, each in backend.model.named_parameters() if each.requires_grad}
    made: Any = {name: each.main_grad for name, each in named.items()}
    return dict(convert.export(made, backend.arch))


def their_gradients(model: Any) -> dict[str, torch.Tensor]:
    """As transformers would write them into a checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, {n: p.grad for n, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_transformers(folders: dict[str, Path], family: str) -> None:
    """On siblings that share their prompt, so the model sees a token tree."""
    backend, model = backend_of(folders[family]), hf_model(folders[family])
    rows, starts = sample_rows(0)
    batch = micro_batch(rows, starts, 0.05, temperature=0.7)
    np.testing.assert_allclose(backend.logprobs([batch])[0], reference_logprobs(model, batch), atol=EXACT)

    backend.forward_backward([batch], nll_loss)
    for row, start in zip(rows, starts, strict=True):
        ids = torch.tensor(row)
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1] / float(batch.temperature[0]), -1)
        (-0.05 * logprobs.gather(1, ids[1:, None])[start - 1 :].sum()).backward()  # type: ignore[no-untyped-call]
    ours, theirs = gradients(backend), their_gradients(model)
    assert ours.keys() - {ROUTER_BIAS} == theirs.keys()
    worst = {name: float((ours[name] - theirs[name]).abs().max()) for name in theirs}
    assert max(worst.values()) <= EXACT, worst
    still = sorted(name for name, gradient in theirs.items() if not gradient.any())
    assert not [name for name in still if ".experts." not in name], "a tensor that nothing depends on proves nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_export_is_the_checkpoint_bit_for_bit(folders: dict[str, Path], family: str) -> None:
    stored, ours = load_file(folders[family] / "model.safetensors"), exported(backend_of(folders[family]))
    assert stored.keys() == ours.keys()
    assert all(torch.equal(stored[name], ours[name]) for name in stored)


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_engine_agree_before_and_after_a_publish(folders: dict[str, Path], family: str) -> None:
    backend, core = backend_of(folders[family]), Core(EngineOptions(str(folders[family]), chunk_size=5))
    before = check_law(backend, core)
    backend.forward_backward(batches_of(0), nll_loss)
    backend.optim_step(LR)
    weights = exported(backend)
    core.views.check(weights, complete=True)
    core.load(weights, "v1")
    assert core.views.checksums()[0].keys() >= weights.keys()
    assert np.abs(check_law(backend, core) - before).max() > 1e-3, "training must have changed something"


def check_law(backend: MegatronBackend, core: Core) -> np.ndarray[Any, Any]:
    """Samples from the engine, holds its logprobs to the trainer's, and returns the trainer's of a fixed row."""
    prompts = [sample_rows(3)[0][0], sample_rows(3)[0][5]]
    for order, prompt in enumerate(prompts):
        core.scheduler.add(core.job(GenerateCall(f"r{order}", tuple(prompt), 1.0, 9, frozenset(), seed=order), order))
    results = [done for _ in range(40) for done in core.step()]
    assert len(results) == 2
    for job, result in results:
        prompt, ids = list(job.call.prompt), list(result.token_ids)
        (ours,) = backend.logprobs([micro_batch([prompt + ids], [len(prompt)], 1.0)])
        np.testing.assert_allclose(ours[0, len(prompt) :], result.logprobs, atol=LAW)
    return backend.logprobs([micro_batch([prompts[0]], [1], 1.0)])[0]


@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
def test_no_company_changes_the_engines_numbers(folders: dict[str, Path], family: str) -> None:
    """Prompts read in pieces while others decode, a cache that grows, beginnings taken from the prefix store."""
    core = Core(EngineOptions(str(folders[family]), chunk_size=7, max_running=3, page_size=4, max_total_tokens=150))
    lengths = [(30, 5), (41, 14), (33, 23), (50, 2), (44, 9)]
    for order, (prompt, new) in enumerate(lengths):
        call = GenerateCall(f"r{order}", tuple(range(10, 10 + prompt)), 0.8, new, frozenset(), seed=order)
        core.scheduler.add(core.job(call, order))
    results = [done for _ in range(200) for done in core.step()]
    assert len(results) == len(lengths)
    assert core.cached > 0
    for job, result in results:
        expected = full_forward(folders[family], list(job.call.prompt), list(result.token_ids), 0.8)
        np.testing.assert_allclose(result.logprobs, expected, atol=LAW)


def test_the_engine_tells_the_experts_of_the_layers_that_have_some(folders: dict[str, Path]) -> None:
    model = load_model(str(folders["deepseek"]), "float32")
    assert sorted(model._routers) == [1]
    assert (model.shape.top_k, model.shape.head_dim) == (4, 24)


def test_latent_dimensions(folders: dict[str, Path]) -> None:
    arch = architecture_of(read_config(folders["deepseek"]))
    assert arch.latent is not None
    assert (arch.latent.q_rank, arch.latent.kv_rank, arch.latent.value, arch.head_dim) == (24, 20, 12, 24)
    assert (arch.experts, arch.topk, arch.groups, arch.group_topk, arch.routed_scale) == (8, 4, 4, 2, 1.7)
    assert (arch.dense_layers, arch.dense_ffn, arch.ffn, arch.shared_ffn) == (1, 96, 32, 64)
    plain = architecture_of(read_config(folders["deepseek-plain"]))
    assert plain.latent is not None
    assert (plain.latent.q_rank, plain.groups) == (0, 0)


def test_what_a_file_leaves_out_is_what_transformers_takes(folders: dict[str, Path]) -> None:
    for family, field, expected in (("qwen3", "head_dim", 128), ("mixtral", "rope_theta", 1e6)):
        config = read_config(folders[family])
        config.pop("head_dim", None)
        config["rope_parameters"] = None
        assert getattr(architecture_of(config), field) == expected


def test_the_routers_bias_stays_and_is_kept(folders: dict[str, Path], tmp_path: Path) -> None:
    """It has no gradient and no moments; a checkpoint has it all the same."""
    folder = folders["deepseek"]
    stored = load_file(folder / "model.safetensors")[ROUTER_BIAS]
    first = backend_of(folder)
    first.forward_backward(batches_of(0), nll_loss)
    first.optim_step(LR)
    assert torch.equal(exported(first)[ROUTER_BIAS], stored)
    first.save(tmp_path / "state")
    second = backend_of(folder)
    with torch.no_grad():
        for name, each in second.model.named_parameters():
            if name.endswith("expert_bias"):
                each.zero_()
    second.load(tmp_path / "state")
    for backend in (first, second):
        backend.forward_backward(batches_of(1), nll_loss)
        backend.optim_step(LR)
    left, right = exported(first), exported(second)
    assert torch.equal(left[ROUTER_BIAS], stored)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_megatron_updates_the_routers_bias_where_a_run_asks_for_it(folders: dict[str, Path]) -> None:
    folder, rate = folders["deepseek-plain"], 0.01
    backend = backend_of(folder, {"moe_router_bias_update_rate": rate})
    before = exported(backend)[ROUTER_BIAS]
    backend.forward_backward(batches_of(0), nll_loss)
    moved = exported(backend)[ROUTER_BIAS] - before
    assert moved.abs().max() == pytest.approx(rate, abs=1e-6)


def test_recomputing_changes_no_gradient(folders: dict[str, Path]) -> None:
    """Places and masks have to be those of the first pass."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain, again = backend_of(folders["deepseek"]), backend_of(folders["deepseek"], full)
    for backend in (plain, again):
        backend.forward_backward(batches_of(0), nll_loss)
    ours, theirs = gradients(again), gradients(plain)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-7


@pytest.mark.parametrize(
    "key", ["moe_router_num_groups", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"]
)
def test_what_the_model_says_cannot_be_passed_through(folders: dict[str, Path], key: str) -> None:
    with pytest.raises(TrainerError, match=f"megatron.{key} cannot be set here: it comes from the model"):
        backend_of(folders["deepseek"], {key: 2})


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .'sliding_attention'."),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("mixtral", {"sliding_window": 512}, "sliding_window = 512"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("mixtral", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ("deepseek", {"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "rope scaling 'yarn'"),
        ("deepseek", {"rope_interleave": False}, "rope_interleave = False"),
        ("deepseek", {"attention_bias": True}, "attention_bias = True"),
        ("deepseek", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("deepseek", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek", {"n_shared_experts": None}, "n_shared_experts = 0"),
        ("deepseek", {"first_k_dense_replace": 2}, "no layer is left"),
        ("deepseek", {"topk_group": 1}, "topk_group = 1 with num_experts_per_tok = 4"),
        ("deepseek-plain", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ("deepseek", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("qwen2", {"layer_types": ["linear_attention", "full_attention"]}, r"hybrid.*\(linear_attention\)"),
        ("qwen2", {"architectures": ["Qwen3NextForCausalLM"], "full_attention_interval": 4}, "Qwen3NextForCausalLM is a hybrid"),
        ("qwen2", {"architectures": ["X"], "text_config": {"linear_num_key_heads": 4}}, "X is a hybrid"),
    ],
)  # fmt: skip
def test_what_would_train_another_function_is_refused(
    folders: dict[str, Path], family: str, change: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        architecture_of({**read_config(folders[family]), **change})


def test_the_engine_refuses_a_window_that_is_shorter_than_the_context(tmp_path: Path) -> None:
    short = make_tiny_family(tmp_path / "short", "mixtral", sliding_window=64)
    with pytest.raises(ModelRefused, match="full attention"):
        load_model(str(short), "float32")


@pytest.mark.walk
class TestFamilies(BackendSuite):
    """The backends' own suite, for every family."""

    @pytest.fixture(params=["qwen2", "qwen3", "mixtral", "deepseek"])
    def folder(self, request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
        return folders[request.param]

    @pytest.fixture
    def make(self) -> MakeBackend:
        def build(folder: Path, *, chunk: int = 0) -> Backend:
            return backend_of(folder, chunk=chunk)

        return build
