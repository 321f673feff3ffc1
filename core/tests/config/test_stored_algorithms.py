"""Settings of algorithms in a checkpoint survive reading, whether the algorithm is installed or not."""

from quark.config.algorithm import StoredAlgoConfig
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig

STORED = {"name": "acme_round", "damp": 0.01, "layers": ["a", "b"]}


def test_settings_come_back_word_for_word() -> None:
    data = QConfig(QLayerConfig(), algo_config=StoredAlgoConfig.from_dict(STORED)).to_dict()
    assert data["algo_config"] == [STORED]
    assert QConfig.from_dict(data).to_dict() == data


def test_the_single_object_of_older_releases_is_taken_as_a_list_of_one() -> None:
    data = QConfig(QLayerConfig()).to_dict() | {"algo_config": STORED}
    assert QConfig.from_dict(data).to_dict()["algo_config"] == [STORED]


def test_no_algorithms_stay_none() -> None:
    assert QConfig.from_dict(QConfig(QLayerConfig()).to_dict()).algo_config is None
