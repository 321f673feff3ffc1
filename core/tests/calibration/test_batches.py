"""Calibration data in every documented form."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    OPTConfig,
    OPTModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import quark_tiny_model as tiny
from quark.calibration import batches
from quark.calibration.batches import calls
from quark.errors import CalibrationError
from quark.torch import LLMTemplate, ModelQuantizer

IDS = torch.arange(12).reshape(3, 4)
MODEL = tiny.tiny_model()


def test_a_dataloader_of_token_ids_gives_one_call_for_each_batch() -> None:
    found = calls(DataLoader(IDS, batch_size=1))
    assert [c.args[0].tolist() for c in found] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]


def test_batches_may_differ_in_length() -> None:
    found = calls([torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 7, dtype=torch.long)])
    assert [c.args[0].shape[1] for c in found] == [3, 7]


def test_a_dict_is_passed_as_keywords_of_its_own_call() -> None:
    masks = [torch.ones(1, 4), torch.ones(1, 4)]
    found = calls([{"input_ids": IDS[:1], "attention_mask": mask} for mask in masks])
    assert [c.kwargs["attention_mask"] is mask for c, mask in zip(found, masks, strict=True)] == [True, True]


def test_a_list_of_dicts_is_one_call_for_each() -> None:
    assert len(calls([[{"input_ids": IDS[:1]}, {"input_ids": IDS[1:2]}]])) == 2


def test_a_tensor_dataset_gives_tuples_of_one() -> None:
    assert calls(DataLoader(TensorDataset(IDS), batch_size=3))[0].args[0].shape == (3, 4)


def test_token_ids_without_a_batch_axis_get_one() -> None:
    assert calls([IDS[0]])[0].args[0].shape == (1, 4)


def test_images_stay_as_they_are() -> None:
    assert calls([torch.zeros(8)])[0].args[0].shape == (8,)


def test_a_single_tensor_is_one_batch() -> None:
    assert len(calls(IDS)) == 1


def test_no_batches_are_refused() -> None:
    with pytest.raises(CalibrationError, match="empty"):
        calls([])


def test_an_empty_tensor_is_refused_by_number() -> None:
    with pytest.raises(CalibrationError, match="batch 1 is an empty tensor"):
        calls([IDS, torch.zeros(1, 0, dtype=torch.long)])


def test_a_batch_of_another_kind_is_refused_by_number_and_kind() -> None:
    with pytest.raises(CalibrationError, match="batch 0 is a str"):
        calls(["a text"])


def test_missing_data_say_what_to_do() -> None:
    with pytest.raises(CalibrationError, match="--calib"):
        calls(None)


def test_tensors_side_by_side_are_positional_arguments() -> None:
    assert [len(c.args) for c in calls([(IDS, IDS), [IDS, IDS, IDS]])] == [2, 3]


def test_positional_arguments_of_a_known_model_get_their_names_so_that_padding_is_seen() -> None:
    found = calls([(IDS, IDS > 2)], model=MODEL)
    assert [c.args[0].tolist() for c in found] == [[[3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]
    assert all(bool(c.kwargs["attention_mask"].all()) for c in found)
    assert [c.run(MODEL).logits.shape[:2] for c in found] == [(1, 1), (1, 4), (1, 4)]


def test_positional_arguments_of_a_model_of_ones_own_get_their_names_too_if_all_have_one() -> None:
    class Own(torch.nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> None:
            """Nobody calls it."""

    class Rest(torch.nn.Module):
        def forward(self, x: Tensor, *rest: Tensor) -> None:
            """Nobody calls it."""

    class First(torch.nn.Module):
        def forward(self, x: Tensor, /, attention_mask: Tensor) -> None:
            """Nobody calls it."""

    assert [c.args[0].tolist() for c in calls([(IDS, IDS > 2)], model=Own())] == [[[3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]
    assert [len(calls([(IDS, IDS > 2)], model=model)[0].args) for model in (Rest(), First())] == [2, 2]


def test_token_ids_in_a_dict_get_a_batch_axis_too() -> None:
    found = calls([{"input_ids": IDS[0], "attention_mask": IDS[0] >= 0}], model=MODEL)[0]
    assert [found.kwargs[name].shape for name in ("input_ids", "attention_mask")] == [(1, 4), (1, 4)]


SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
MASK = torch.ones(3, 4, dtype=torch.long)
BAD = {
    "have the dtype torch.float32. Convert them to torch.int64": IDS.float(),
    "have the dtype torch.int16": IDS.short(),
    "have the dtype torch.bool": IDS > 2,
    r"has the token id 1024, but the model's token ids are 0 to 1023": IDS + 1013,
    "has the token id -1": IDS - 1,
    r"have the shape \[1, 3, 4\]": IDS[None],
    "'attention_mask' of calibration batch 1 has the shape": {"input_ids": IDS, "attention_mask": MASK[:, :3]},
    "is on the meta device": IDS.to("meta"),
    "'attention_mask' of calibration batch 1 is on the meta device": {"input_ids": IDS, "attention_mask": MASK.to("meta")},
    "has no 'input_ids'. Add it, because this model needs it; the batch has 'labels'": {"labels": IDS},
    "'input_ids' of calibration batch 1 is a list": {"input_ids": IDS.tolist()},
    "'input_ids' of calibration batch 1 is an empty tensor": {"input_ids": IDS[:, :0]},
    "has 40 tensors": (IDS,) * 40,
    "is a tuple": (IDS, None),
}


@pytest.mark.parametrize("words", BAD)
def test_what_the_model_cannot_take_is_refused_by_number_before_any_forward(words: str) -> None:
    with pytest.raises(CalibrationError, match=words) as refused:
        calls([IDS, BAD[words]], model=MODEL)
    assert "batch 1" in str(refused.value)


def test_a_refused_batch_leaves_the_model_as_it_was() -> None:
    model = tiny.tiny_model()
    config = LLMTemplate.get("llama").get_config(scheme="fp8")
    with pytest.raises(CalibrationError, match="batch 1 has the token id 1024"):
        ModelQuantizer(config).quantize_model(model, [IDS, IDS + 1013])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), MODEL.state_dict().values(), strict=True))


def test_embeddings_do_in_place_of_token_ids() -> None:
    assert calls([{"inputs_embeds": torch.zeros(1, 4, 256)}], model=MODEL)[0].run(MODEL).logits.shape[:2] == (1, 4)


def test_of_a_model_that_says_nothing_of_its_inputs_nothing_is_asked() -> None:
    assert len(calls([IDS.float(), torch.zeros(2, 3, 8, 8)], model=torch.nn.Linear(4, 4))) == 2


def test_data_that_raise_in_the_middle_are_named_with_the_batch() -> None:
    def broken() -> Iterator[Tensor]:
        yield IDS
        raise KeyError("text")

    with pytest.raises(CalibrationError, match=r"batch 1 cannot be read: the data raised KeyError: 'text'") as refused:
        calls(broken())
    assert isinstance(refused.value.__cause__, KeyError)


def test_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(CalibrationError, match="'int' object is not iterable"):
        calls(5)  # type: ignore[arg-type]


def test_data_without_an_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_BATCHES", 5)
    with pytest.raises(CalibrationError, match=r"more than 5 batches.*islice"):
        calls(itertools.repeat(IDS[:1]))
    assert len(calls(itertools.islice(itertools.repeat(IDS[:1]), 5))) == 5
    assert len(calls([IDS[:1]] * 6)) == 6, "a list has an end, however long it is"


def test_data_that_are_padding_alone_are_refused_and_a_sample_of_padding_is_no_call() -> None:
    nothing = {"input_ids": IDS, "attention_mask": 0 * MASK}
    with pytest.raises(CalibrationError, match="only padding"):
        calls([nothing, nothing])
    found = calls([{"input_ids": IDS, "attention_mask": MASK}, nothing])
    assert [c.kwargs["input_ids"].shape for c in found] == [(3, 4)]


SEQUENCES = {"vocab_size": 64, "d_model": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4, "d_ff": 8, "decoder_start_token_id": 0}


def test_a_decoder_behind_an_encoder_reads_the_same_tokens_where_the_data_has_none_for_it() -> None:
    model = T5ForConditionalGeneration(T5Config(**SEQUENCES)).eval()
    ids = torch.tensor([[5, 6, 7, 1]])
    found = calls([ids, {"input_ids": ids, "decoder_input_ids": ids}], model=model)
    assert found[0].kwargs["decoder_input_ids"].tolist() == [[0, 5, 6, 7]]
    assert found[1].kwargs["decoder_input_ids"] is ids
    with torch.no_grad():
        assert found[0].run(model).logits.shape == (1, 4, 64)
    assert "decoder_input_ids" not in calls([ids], model=T5EncoderModel(T5Config(**SEQUENCES)))[0].kwargs


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (ViTModel(ViTConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)), "pixel_values"),
        (CLIPModel(CLIPConfig(text_config=SIZES, vision_config={**SIZES, "patch_size": 112})), "pixel_values"),
    ],
    ids=["images", "two towers"],
)
def test_token_ids_for_a_model_that_takes_something_else_are_refused(model: torch.nn.Module, name: str) -> None:
    with pytest.raises(CalibrationError, match=rf"has token ids, but a \w+ needs the input '{name}'.*ModelQuantizer"):
        calls([IDS], model=model)
    data = [{"input_ids": IDS, name: torch.zeros(3, 3, 224, 224)}]
    assert set(calls(data, model=model)[0].kwargs) == {"input_ids", name}


SMALL = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("model", "positions"),
    [
        (GPT2Model(GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2, n_positions=16)), 16),
        (BertModel(BertConfig(**SMALL, max_position_embeddings=16)), 16),
        (RobertaModel(RobertaConfig(**SMALL, max_position_embeddings=18, pad_token_id=1)), 16),
        (OPTModel(OPTConfig(**SMALL, max_position_embeddings=16, ffn_dim=8, word_embed_proj_dim=8)), 16),
        (LlamaModel(LlamaConfig(**SMALL, max_position_embeddings=16)), None),
    ],
    ids=["gpt2", "bert", "roberta", "opt", "computed"],
)
def test_sequences_longer_than_a_table_of_positions_are_refused(model: torch.nn.Module, positions: int | None) -> None:
    longest, more = torch.full((1, 16), 5), torch.full((1, 17), 5)
    assert len(calls([longest], model=model)) == 1
    with torch.no_grad():
        model(longest)
    if positions is None:
        assert len(calls([more], model=model)) == 1
        return
    with pytest.raises((IndexError, RuntimeError)), torch.no_grad():
        model(more)
    with pytest.raises(CalibrationError, match=r"has 17 tokens, but the model has only 16 positions\. .*--seq-len 16"):
        calls([more], model=model)


def test_data_of_inference_mode_are_copied_and_others_are_not() -> None:
    with torch.inference_mode():
        data = [{"inputs_embeds": torch.randn(1, 4, 8), "positions": (torch.arange(4.0), None)}]
        (call,) = calls(data, model=torch.nn.Linear(8, 8))
    assert not call.kwargs["inputs_embeds"].is_inference()
    assert not call.kwargs["positions"][0].is_inference()
    assert torch.equal(call.kwargs["inputs_embeds"], data[0]["inputs_embeds"])
    ordinary = torch.randn(2, 8)
    (call,) = calls([ordinary], model=torch.nn.Linear(8, 8))
    assert call.args[0].data_ptr() == ordinary.data_ptr()


def test_an_empty_dict_has_nothing() -> None:
    with pytest.raises(CalibrationError, match="the batch has nothing"):
        calls([{}], model=MODEL)
