"""Calibration data in every documented form."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from quark.errors import CalibrationError
from quark.pipeline.batches import calls

IDS = torch.arange(12).reshape(3, 4)


def test_a_dataloader_of_token_ids_gives_one_call_for_each_batch() -> None:
    found = calls(DataLoader(IDS, batch_size=1))
    assert [c.args[0].tolist() for c in found] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]


def test_batches_may_differ_in_length() -> None:
    found = calls([torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 7, dtype=torch.long)])
    assert [c.args[0].shape[1] for c in found] == [3, 7]


def test_a_dict_is_passed_as_keywords_of_its_own_call() -> None:
    masks = [torch.ones(1, 4), torch.zeros(1, 4)]
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
