"""Encoders: what is read of them, what is refused, and that they are priced like any model."""

import json

import numpy as np
import pytest

from costmodels.job.described_model import describe_model, described_model
from costmodels.job.hugging_face.reader import model_from_hugging_face
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.training_job import TrainingJob
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.settings.random_settings import grid_of, setting_for

BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 768,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
ROBERTA = {**BERT, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "max_position_embeddings": 514}
ROBERTA |= {"type_vocab_size": 1, "vocab_size": 50265}
MODERNBERT = {
    "model_type": "modernbert",
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "global_attn_every_n_layers": 3,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "local_attention": 128,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "vocab_size": 50368,
}
VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 768,
    "image_size": 224,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "id2label": {str(at): f"class {at}" for at in range(1000)},
}
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 3072,
    "d_kv": 64,
    "d_model": 768,
    "is_encoder_decoder": True,
    "n_positions": 512,
    "num_heads": 12,
    "num_layers": 12,
    "output_past": True,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
}
ALL = {"bert": BERT, "roberta": ROBERTA, "modernbert": MODERNBERT, "vit": VIT, "t5": T5}


def read(mapping):
    """The model of a config.json."""
    return model_from_hugging_face(mapping, name="some-model", file="some-model.json")


@pytest.mark.parametrize(
    ("name", "published"),
    # bert-base-uncased, roberta-base and ModernBERT-base with their heads for masked words; torchvision's vit_b_16; and
    # t5-base
    [
        ("bert", 109_514_298),
        ("roberta", 124_697_433),
        ("modernbert", 149_655_232),
        ("vit", 86_567_656),
        ("t5", 222_903_552),
    ],
)
def test_published_encoders_have_the_published_parameters(name, published):
    """To the last parameter, and as many once the model comes back from JSON."""
    model = read(ALL[name])

    assert model.num_parameters == published
    assert described_model(json.loads(json.dumps(describe_model(model)))) == model


def test_windows_of_modernbert_have_half_their_size_on_either_side():
    """Every third layer sees all tokens, and the others 64 before and behind."""
    masks = [layer[0].mask for layer in read(MODERNBERT).layers]

    assert [(mask.window, mask.causal) for mask in masks[:4]] == [(0, False), (64, False), (64, False), (0, False)]
    assert masks[1].share(6400.0) == pytest.approx(128 / 6400, rel=0.01)


def test_decoders_of_t5_attend_to_the_encoder():
    """Twelve layers see all tokens; behind them twelve see earlier tokens, and all of the encoder's."""
    kinds = [[block.label for block in layer] for layer in read(T5).layers]

    assert kinds == [["full_attention", "dense_mlp"]] * 12 + [["attention", "cross_attention", "dense_mlp"]] * 12
    assert "both priced with job.sequence_length tokens" in read(T5).remarks[0]


def test_a_class_has_one_row_of_logits_for_each_image():
    """Model FLOPs count the classifier once a sequence; of masked words, all tokens have logits."""
    vit, bert = read(VIT), read(BERT)
    fewer = read(VIT | {"id2label": {"0": "one"}})

    assert 197 * (vit.model_flops_per_token(197) - fewer.model_flops_per_token(197)) == pytest.approx(6 * 999 * 768)
    layers = 12 * (12 * 768**2 + 13 * 768)
    head = 768 * 768 + 768 + 2 * 768 + 30522 * 768
    assert bert.model_flops_per_token(512) == pytest.approx(6 * (layers + head) + 12 * 12 * 768 * 512)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tie_word_embeddings": False}, "must be true"),
        ({"is_decoder": True}, "is_decoder = True: must be false"),
        ({"architectures": ["BertForPreTraining"]}, "is read with the head ForMaskedLM alone"),
        ({"position_embedding_type": "relative_key"}, "must be absolute"),
        ({"embedding_size": 128}, "embedding_size = 128: may change the model"),
    ],
)
def test_other_heads_and_positions_are_refused(change, told):
    """What would change sizes, and is not read, is named."""
    with pytest.raises(ConfigError) as caught:
        read(BERT | change)

    assert told in str(caught.value)


@pytest.mark.parametrize("name", ALL)
def test_steps_and_memory_are_those_of_any_model(name):
    """The simulator agrees with the closed form, and states are 18 bytes a parameter without sharding."""
    length = 197 if name == "vit" else 512
    model = read(ALL[name])
    job = TrainingJob(model=model, sequence_length=length, global_batch_size=1024)
    setting = setting_for(job, find_cluster("dgx-h100"))
    configs = [ParallelConfig(dp=8, mbs=16, zero_stage=0), ParallelConfig(pp=2, tp=2, dp=2, mbs=16, recompute="full")]

    seconds = estimate_step(setting, grid_of(*configs)).step_time_s
    assert [simulate_step(setting, config).step_time_s for config in configs] == pytest.approx(seconds, rel=0.03)
    parts = estimate_memory(setting, grid_of(configs[0])).parts_bytes
    states = sum(float(parts[part][0]) for part in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(18 * model.num_parameters)
    assert np.all(seconds > 0)
