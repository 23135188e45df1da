"""Captures models of transformers with all that they do beside computing."""

from functools import partial
from importlib import import_module

import torch
from torch import nn, optim

from olla_fx.models import import_torchvision, logits_loss
from tests.olla_fx.harness import WholeStep

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 32, "vocab_size": 32, "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip


def transformer(architecture, kind, **sizes) -> nn.Module:
    import_torchvision()
    transformers = import_module("transformers")
    config = transformers.AutoConfig.for_model(architecture, **{**SIZES, **sizes})
    return getattr(transformers, kind).from_config(config).train()


def segmenting() -> nn.Module:
    return transformer(
        "segformer",
        "AutoModelForSemanticSegmentation",
        depths=[1, 1], hidden_sizes=[8, 8], num_attention_heads=[1, 1], num_encoder_blocks=2,
        sr_ratios=[2, 1], patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[1, 1], decoder_hidden_size=8,
    )  # fmt: skip


def train(model, batches, loss_fn=logits_loss) -> WholeStep:
    return WholeStep(model, partial(optim.SGD, lr=0.1), batches[0], loss_fn).run(batches)


def pixels():
    return [(torch.randn(2, 3, 16, 16), torch.randn(2, 2, 8, 8)) for _ in range(2)]


def nearness(outputs, target):
    return (outputs.logits - target).square().mean()


def test_a_look_at_token_numbers_for_a_warning_is_left_out():
    batches = [(torch.randint(1, 32, (2, 8)), torch.randint(2, (2,))) for _ in range(2)]
    train(transformer("megatron-bert", "AutoModelForSequenceClassification"), batches)


def test_hooks_that_gather_hidden_states_run_while_tracing():
    train(segmenting(), pixels(), nearness)


def test_hooks_that_an_earlier_forward_added_are_taken():
    model = segmenting()
    model(torch.randn(1, 3, 16, 16), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    train(model, pixels(), nearness)


def test_activation_checkpointing():
    """It hangs a hook on the embedding, so that checkpoints see an input that wants a gradient."""
    model = transformer("gpt2", "AutoModelForCausalLM", n_layer=2, n_embd=16, n_head=2, use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batches = [(torch.randint(1, 32, (2, 8)), torch.randint(32, (2, 8))) for _ in range(4)]
    assert train(model, batches).step.plan.checkpointed_operators > 20


def test_mixtures_of_experts():
    model = transformer(
        "mixtral", "AutoModelForCausalLM", num_local_experts=2, num_experts_per_tok=1, use_cache=False
    )
    assert model.config._experts_implementation == "grouped_mm"
    batches = [(torch.randint(1, 32, (2, 8)), torch.randint(32, (2, 8))) for _ in range(2)]
    train(model, batches)


def test_saving_a_model_makes_no_new_plan(tmp_path):
    """It notes the model's class and the type of its weights in the configuration."""
    transformer("bert", "AutoModelForSequenceClassification").save_pretrained(tmp_path)
    model = import_module("transformers").AutoModelForSequenceClassification.from_pretrained(tmp_path).train()
    assert model.config.dtype == torch.float32
    model.config.architectures = None
    batches = [(torch.randint(1, 32, (2, 8)), torch.randint(2, (2,))) for _ in range(2)]
    pair = train(model, batches)
    model.save_pretrained(tmp_path)
    assert model.config.architectures
    assert model.config.dtype == "float32"
    pair.run(batches)
    assert pair.step.stats.replans == 0
    model.config.dtype = torch.float64
    pair.run(batches)
    assert pair.step.stats.replans == 1
