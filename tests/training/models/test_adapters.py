"""LoRA: what is trained, what is written and read, and that a merged model computes what model and adapter do."""

import json
from dataclasses import replace

import pytest
from needed import needs, since

torch = pytest.importorskip("torch")
needs("transformers", "peft")

from chatglm_checkpoint import random_weights, write_checkpoint
from tiny_checkpoints import tiny_config
from transformers import AutoModelForCausalLM

from dsrun.errors import DsrunError
from dsrun.options.table import PeftOptions
from dsrun.packages import installed_version
from dsrun.training.models import adapters
from dsrun.training.models.checkpoint_parts import Composed
from dsrun.training.models.export import _write_model, shards
from dsrun.training.models.load import load_answering
from dsrun.training.models.tokenizer import load_tokenizer
from dsrun.training.models.weights import open_shard
from dsrun.versions import meets

LORA = PeftOptions(method="lora", lora_rank=3, lora_alpha=12.0)
IDS = torch.tensor([[5, 7, 31, 31, 2, 99, 64, 3, 11, 17]])
LLAMA = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


class Words:
    """Stands for a tokenizer where nothing is tokenised."""

    pad_token_id = 0

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def llama(**fields):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**LLAMA | fields)).eval()


def trained(model, spec=LORA, seed=5):
    """The model with LoRA on it, as if it had been trained: no part of it adds nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapters.add_lora(model, spec)
        with torch.no_grad():
            for weight in own(model).values():
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def own(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


class Asked:
    """The little of a Job that writing an adapter asks for."""

    def __init__(self, base, peft=LORA, source="folder", architecture=None):
        from dsrun.job.job import ModelSpec, Prepared

        self.peft = peft
        self.model = ModelSpec("some", source, str(base), "auto", architecture or {})
        self.prepared = Prepared(str(base), "", None)


@pytest.fixture
def base(tmp_path):
    """A Llama's folder."""
    folder = tmp_path / "the base 模型"
    llama().save_pretrained(folder)
    return folder


def written(model, base, folder, **more):
    folder.mkdir()
    adapters.write_adapter(model, own(model), Words(), Asked(base, **more), folder)
    return folder


def test_nothing_but_lora_is_trained_and_at_first_it_adds_nothing():
    model = llama()
    before, weights = logits(model), {name: weight.clone() for name, weight in model.state_dict().items()}
    adapters.add_lora(model, LORA)
    assert torch.equal(logits(model), before)
    names = list(own(model))
    assert len(names) == 2 * 7 * LLAMA["num_hidden_layers"]
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert not [name for name in names if "lm_head" in name or "embed" in name]
    assert {name.split(".")[-4] for name in names} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    held = {name.replace(".base_layer", ""): weight for name, weight in model.state_dict().items()}
    assert all(torch.equal(held[name], weight) for name, weight in weights.items())


def test_glms_own_layers_are_found(tmp_path):
    folder = write_checkpoint(tmp_path / "original", random_weights(), "bin")
    model = load_answering(folder, dtype=torch.float32)
    expected = ["down_proj", "gate_up_proj", "k_proj", "o_proj", "q_proj", "v_proj"]
    assert adapters.targets(model, "all") == (expected, [])


@pytest.mark.parametrize(
    ("wanted", "tied", "says"),
    [
        ("q_proj,query", False, "query: no linear layer"),
        ("embed_tokens", False, "no linear layer"),
        (",", False, "names no layer"),
        ("lm_head,q_proj", True, "embedding's"),
    ],
)
def test_targets_that_make_no_sense_are_refused(wanted, tied, says):
    with pytest.raises(DsrunError, match=says):
        adapters.targets(llama(tie_word_embeddings=tied), wanted)


def test_chosen_layers_alone_get_it():
    model = llama()
    adapters.add_lora(model, replace(LORA, lora_target="v_proj, lm_head"))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in own(model)} == {"v_proj", "lm_head"}


def test_the_first_numbers_are_those_of_the_seed():
    class Job:
        peft = LORA

        class training:  # noqa: N801
            seed = 7

    first, second = llama(), llama()
    adapters.put_on(first, Job)
    torch.manual_seed(999)
    after = torch.rand(1)
    torch.manual_seed(999)
    adapters.put_on(second, Job)
    assert torch.rand(1) == after, "what is drawn elsewhere is not disturbed"
    assert all(torch.equal(weight, own(second)[name]) for name, weight in own(first).items())
    assert any(weight.abs().max() > 0 for weight in own(first).values())


def merged(plain, model) -> dict:
    """A model's weights with the LoRA of another one."""
    added = adapters.additions(model)
    return {name: adapters.merged(name, one, own(model), added) for name, one in plain.state_dict().items()}


def all_of(weights: dict):
    """As `write_folders` takes them."""
    return lambda names: {name: weights[name] for name in names}


def test_a_merged_model_may_have_one_matrix_for_both_ends(tmp_path):
    from transformers import AutoModelForCausalLM

    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    model = trained(llama(tie_word_embeddings=True))
    plain = load_answering(tmp_path / "base", dtype=torch.float32)
    _write_model(
        Composed(plain, shards(plain), all_of(merged(plain, model))), Words(), [2], tmp_path / "merged"
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(again), logits(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_model_computes_what_the_adapted_one_does(tmp_path, base, dtype):
    model = trained(llama())
    plain = llama().to(dtype)
    weights = merged(plain, model)
    _write_model(Composed(plain, shards(plain), all_of(weights)), Words(), [2], tmp_path / "merged")
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert again.dtype == dtype, "the base's own type"
    assert not torch.allclose(logits(model), logits(llama()), atol=0.05)
    if dtype == torch.float32:
        assert torch.allclose(logits(again), logits(model), atol=1e-5, rtol=0)
    else:
        assert torch.allclose(logits(again).float(), logits(model), atol=0.05, rtol=0)
        changed = [n for n, w in llama().to(dtype).state_dict().items() if not torch.equal(w, weights[n])]
        assert len(changed) == 14, "norms, embedding and output are as they were"


def test_an_adapter_is_pefts_own_format(tmp_path, base):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = trained(llama())
    folder = written(model, base, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 12, "LORA")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    assert torch.allclose(logits(theirs), logits(model), atol=1e-6)
    by_itself = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(logits(by_itself), logits(model), atol=1e-6)


def test_an_adapter_answers_with_the_model_that_it_names(tmp_path, base):
    model = trained(llama())
    folder = written(model, base, tmp_path / "adapter")
    for found in (
        load_answering(folder, dtype=torch.float32),
        load_answering(base, dtype=torch.float32, adapter=folder),
    ):
        assert torch.allclose(logits(found), logits(model), atol=1e-5, rtol=0)
    before = load_answering(base, dtype=torch.float32)
    assert torch.equal(logits(before), logits(llama())), "the base's files are as they were"


def test_an_adapter_of_chatglm_answers_with_the_original_folder(tmp_path):
    from dsrun.models import resolve

    original = write_checkpoint(tmp_path / "original", random_weights(), "safetensors")
    spec, _ = resolve.resolve(str(original), None)
    model = trained(load_answering(original, dtype=torch.float32))
    folder = written(model, original, tmp_path / "adapter", source="chatglm", architecture=spec.architecture)
    assert torch.allclose(
        logits(load_answering(folder, dtype=torch.float32)), logits(model), atol=1e-5, rtol=0
    )
    assert load_tokenizer(original)("你好")["input_ids"]


def test_training_goes_on_from_an_adapter(tmp_path, base):
    model = trained(llama())
    folder = written(model, base, tmp_path / "adapter")

    class Job:
        peft = replace(LORA, adapter=str(folder))

        class training:  # noqa: N801
            seed = 7

    again = llama()
    adapters.put_on(again, Job)
    assert torch.equal(logits(again), logits(model))


def test_another_models_adapter_is_refused(tmp_path, base):
    model = trained(llama(hidden_size=64, num_hidden_layers=3))
    folder = written(model, base, tmp_path / "adapter")
    with pytest.raises(DsrunError, match=r"layers\.2|shape|x"):
        load_answering(folder, dtype=torch.float32)
    other = llama()
    adapters.add_lora(other, LORA)
    stored = open_shard(folder / "adapter_model.safetensors")
    with pytest.raises(DsrunError) as caught:
        adapters.fill_lora(other, stored, folder)
    said = " ".join(problem.what for problem in caught.value.problems)
    assert "no place for" in said and "shape" in said
    with pytest.raises(DsrunError, match="lacks"):
        adapters.fill_lora(other, {}, folder)


# Mixtures of experts


MIXTURES = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 48},
    "qwen3_moe": {
        "num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 32, "head_dim": 8},
}  # fmt: skip
"""gpt-oss has its experts' matrices the other way round."""
TENSORS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
WITH_EXPERTS = replace(LORA, lora_target="all,experts")


def mixture(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    sizes = LLAMA | {"num_experts_per_tok": 2, "pad_token_id": 0, "initializer_range": 0.2}
    config = AutoConfig.for_model(kind, **sizes | MIXTURES[kind])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def in_peft(kind, **more):
    """The same, by PEFT alone: with LoRA on attention and experts."""
    from peft import LoraConfig, get_peft_model

    modules = ["k_proj", "o_proj", "q_proj", "v_proj"]
    config = LoraConfig(
        r=3, lora_alpha=12, target_modules=modules, target_parameters=TENSORS, task_type="CAUSAL_LM"
    )
    return get_peft_model(mixture(kind), config)


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_get_it_as_peft_puts_it_on_them(kind):
    model, theirs = trained(mixture(kind), WITH_EXPERTS), in_peft(kind).eval()
    weights = {f"base_model.model.{name}": weight for name, weight in own(model).items()}
    wanted = {name: weight for name, weight in theirs.named_parameters() if weight.requires_grad}
    assert {name: weight.shape for name, weight in weights.items()} == {
        name: weight.shape for name, weight in wanted.items()
    }
    theirs.load_state_dict(weights, strict=False)
    losses = [one(IDS, labels=IDS).loss for one in (model, theirs)]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), abs=1e-6)
    for loss in losses:
        loss.backward()
    for name, weight in own(model).items():
        assert torch.allclose(weight.grad, wanted[f"base_model.model.{name}"].grad, atol=1e-6), name
    plain = mixture(kind)
    found, expected = merged(plain, model), theirs.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], weight, atol=1e-6) for name, weight in expected.items())
    changed = {name for name, weight in plain.state_dict().items() if not torch.equal(weight, found[name])}
    assert len(changed) == 2 * (4 + 2)


@pytest.mark.parametrize("kind", MIXTURES)
def test_an_adapter_with_experts_goes_out_and_comes_back(tmp_path, kind):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    mixture(kind).save_pretrained(base)
    model = trained(mixture(kind), WITH_EXPERTS)
    folder = written(model, base, tmp_path / "adapter", peft=WITH_EXPERTS)
    if meets(installed_version("transformers"), ">=5.1"):  # PEFT's own loading of experts asks for it
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        assert torch.allclose(logits(theirs.eval()), logits(model), atol=1e-6)
    assert not torch.allclose(logits(model), logits(mixture(kind)), atol=0.01)
    answers = load_answering(base, dtype=torch.float32, adapter=folder)
    assert torch.allclose(logits(answers), logits(model), atol=1e-5)
    again = mixture(kind)
    fields = adapters.formats.read_adapter(folder).fields
    adapters.put_on(again, mixture_job(PeftOptions(method="lora", adapter=str(folder), **fields)))
    assert torch.allclose(logits(again), logits(model), atol=1e-6)


def mixture_job(peft, stage=2, **more):
    class Job:
        zero_stage, fsdp = stage, None

        class training:  # noqa: N801
            seed, compile = 7, False

    Job.peft = peft
    for name, value in more.items():
        setattr(Job, name, value)
    return Job


def test_without_the_word_attention_alone_gets_it_and_that_is_said():
    from dsrun.training.worker import trained_share

    model = trained(mixture("mixtral"))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in own(model)} == {
        "k_proj", "o_proj", "q_proj", "v_proj",
    }  # fmt: skip
    said = trained_share(model, "lora")
    assert "no experts (--lora-target all,experts" in said and "self_attn.q_proj" in said
    said = trained_share(trained(mixture("mixtral"), WITH_EXPERTS), "lora")
    assert "mlp.experts.down_proj" in said and "no experts" not in said
    assert ":" not in trained_share(trained(llama()), "lora")


def test_names_that_peft_takes_for_the_experts():
    """Shared experts' and dense layers' matrices have names that stood for the experts' in transformers 4."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    config = AutoConfig.for_model("deepseek_v3", **{**LLAMA, **sizes, "pad_token_id": 0})
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        DsrunError, match="down_proj: PEFT takes the name for that of DeepseekV3ForCausalLM's experts"
    ):
        adapters.targets(model, "o_proj,down_proj")
    assert adapters.targets(model, "all,experts").parameters == TENSORS
    names = {name.split(".lora_")[0] for name in own(trained(model))}
    assert names and all(".self_attn." in name for name in names)


@pytest.mark.parametrize("name", ["gate", "mlp.gate", "all,gate"])
def test_routers_are_trained_by_their_name_alone(name):
    assert adapters.targets(mixture("mixtral"), name).parameters == ["mlp.gate.weight"]
    assert adapters.targets(mixture("mixtral"), "all,experts").parameters == TENSORS


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_the_planner_counts_them(kind):
    from dsrun.planner.lora import expert_weights
    from dsrun.planner.shape import from_config

    model = mixture(kind)
    counted = expert_weights(from_config(model.config.to_dict(), "config.json"), 3)
    adapters.add_lora(model, replace(LORA, lora_target="experts"))
    assert counted == sum(weight.numel() for weight in own(model).values()) > 0


def test_some_of_the_experts_tensors():
    assert adapters.targets(mixture("qwen3_moe"), "q_proj, down_proj") == (["q_proj"], [TENSORS[0]])


@pytest.mark.parametrize("target", ["experts", "down_proj"])
@pytest.mark.parametrize(
    ("more", "says"),
    [({"stage": 3}, "ZeRO-3"), ({"fsdp": True}, "FSDP"), ({"lora_dropout": 0.1}, "dropout")],
)
def test_what_peft_cannot_do_with_experts_is_refused(target, more, says):
    peft = replace(LORA, lora_target=target, lora_dropout=more.get("lora_dropout", 0.0))
    with pytest.raises(DsrunError, match=says):
        adapters.put_on(mixture("mixtral"), mixture_job(peft, **{**more, "lora_dropout": None}))


def test_a_model_without_experts_has_none_to_name():
    with pytest.raises(DsrunError, match="experts: no linear layer"):
        adapters.targets(llama(), "all,experts")


def test_a_base_that_is_gone_is_named(tmp_path, base):
    folder = written(trained(llama()), tmp_path / "elsewhere", tmp_path / "adapter")
    with pytest.raises(DsrunError, match="elsewhere") as caught:
        load_answering(folder, dtype=torch.float32)
    assert "base_model_name_or_path" in caught.value.problems[0].hint


def test_four_bits_are_close_and_lora_goes_on_them():
    bnb = pytest.importorskip("bitsandbytes")
    wide = {"hidden_size": 128, "intermediate_size": 256}
    model, plain = llama(**wide), logits(llama(**wide))
    adapters.quantise(model, torch.device("cpu"), torch.float32)
    small = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(small) == 7 * LLAMA["num_hidden_layers"]
    assert all(layer.weight.dtype == torch.uint8 for layer in small)
    assert {layer.weight.quant_state.quant_type for layer in small} == {"nf4"}
    assert type(model.lm_head) is torch.nn.Linear
    rounded = logits(model)
    assert 0 < (rounded - plain).abs().max() < 0.3 * plain.abs().max()
    adapters.add_lora(model, LORA)
    # At first it adds nothing; the kernel is another one where there may be gradients.
    assert (logits(model) - rounded).abs().max() < 0.1 * (rounded - plain).abs().max()
    model(IDS, labels=IDS).loss.backward()
    assert all(weight.grad is not None for weight in own(model).values())
    assert len(own(model)) == 2 * len(small)


@since(transformers="5.2")
def test_layers_whose_weight_a_kernel_takes_get_none():
    """Mamba's fused kernel is given the weight of out_proj, and would know nothing of LoRA's part."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("falcon_h1"))
    assert {name.rpartition(".")[2] for name in adapters.passed_by(model)} == {"out_proj"}
    assert "in_proj" in adapters.targets(model, "all").modules
    assert "out_proj" not in adapters.targets(model, "all").modules
    with pytest.raises(
        DsrunError, match="out_proj: FalconH1ForCausalLM's kernels take this weight without LoRA"
    ):
        adapters.targets(model, "q_proj,out_proj")


class LooksAtItsWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called, self.taken = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.called(rows.to(self.called.weight.dtype))
        return torch.nn.functional.linear(rows, self.taken.weight)


def test_a_look_at_a_weights_type_takes_nothing():
    assert list(adapters.passed_by(torch.nn.Sequential(LooksAtItsWeight()))) == ["0.taken"]
