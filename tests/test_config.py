import dataclasses
import json
import pickle
import subprocess
import sys

import cloudpickle
import pytest

from spmdlab.config import Experiment, load_experiment
from spmdlab.data.config import DataConfig
from spmdlab.errors import ConfigError
from spmdlab.models.config import DecoderConfig
from spmdlab.strategies import Data, Fsdp, Tensor
from spmdlab.workload import BatchConfig


def tiny(**changes) -> Experiment:
    values = {
        "model": DecoderConfig(
            vocab_size=256,
            num_layers=2,
            embed_dim=32,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            mlp_dim=64,
        ),
        "batch": BatchConfig(global_batch=8, seq_len=16),
        "strategies": {"data": Data(8), "fsdp_tp": Fsdp(4) * Tensor(2)},
        "targets": ("cpu:8", "local", "2*v5e:16x16"),
        "chips": {"v5e": {"hbm_bytes": 1e9}},
    }
    return Experiment(**values | changes)


def test_a_sound_experiment_has_no_problems():
    assert tiny().problems() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"strategies": {}}, "strategies is empty", id="no-strategy"),
        pytest.param({"targets": ()}, "targets is empty", id="no-target"),
        pytest.param({"strategies": {"a": Data}}, r"strategies\['a'\].*Data\(8\)", id="class"),
        pytest.param({"targets": ("v5e:3x3",)}, "v5e:3x3", id="impossible-slice"),
        pytest.param({"targets": ("v99:2x2",)}, "v99", id="unknown-chip"),
        pytest.param({"targets": "cpu:8"}, "targets must be tuple", id="target-not-in-a-tuple"),
        pytest.param({"chips": {"v5x": {}}}, "v5x", id="override-of-unknown-chip"),
        pytest.param({"chips": {"v5e": {"hmb": 1.0}}}, "hmb", id="override-of-unknown-field"),
        pytest.param({"model": None}, "model must be DecoderConfig, got None", id="no-model"),
        pytest.param({"seed": -1}, "seed must be a whole number from 0", id="negative-seed"),
        pytest.param({"seed": 2**32}, r"from 0 to 2\*\*32 - 1, got 4294967296", id="large-seed"),
        pytest.param({"seed": True}, "seed must be int", id="bool-for-a-number"),
        pytest.param({"data": DataConfig(source="")}, "data.source is empty", id="no-source"),
        pytest.param({"data": DataConfig(seed=-1)}, "data.seed must be", id="data-seed"),
        pytest.param(
            {"data": DataConfig(test_percent=-1)}, "data.test_percent must", id="negative-percent"
        ),
        pytest.param(
            {"data": DataConfig(valid_percent=50, test_percent=50)},
            r"leave something to train on, got 50 \+ 50",
            id="nothing-to-train-on",
        ),
        pytest.param(
            {"data": DataConfig(near_duplicate=0)}, "data.near_duplicate must", id="similarity"
        ),
        pytest.param(
            {"batch": BatchConfig(global_batch="8", seq_len=16)},
            "batch.global_batch must be int",
            id="text-for-a-number",
        ),
    ],
)
def test_refuses_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as raised:
        tiny(**changes).check()
    assert "\n" not in str(raised.value)


def test_the_data_s_seed_is_the_experiment_s_unless_it_has_its_own():
    assert tiny(seed=7).data_seed == 7
    assert tiny(seed=7, data=DataConfig(seed=0)).data_seed == 0


def test_all_problems_are_told_at_once():
    experiment = tiny(targets=("v5e:3x3", "v99:2x2"))
    experiment.model.num_kv_heads = 3
    with pytest.raises(ConfigError, match=r"num_kv_heads.*v5e:3x3.*v99"):
        experiment.check()


def test_json_names_strategies_by_their_text():
    said = tiny().to_json()
    assert json.loads(json.dumps(said)) == said
    assert said["strategies"] == {"data": "data=8", "fsdp_tp": "fsdp=4 tensor=2"}
    assert said["batch"]["seq_len"] == 16
    assert said["targets"] == ["cpu:8", "local", "2*v5e:16x16"]


CONFIG = """\
import dataclasses
from spmdlab.config import Experiment
from spmdlab.models.config import DecoderConfig
from spmdlab.strategies import Data
from spmdlab.workload import BatchConfig

@dataclasses.dataclass(frozen=True)
class Mine:
    ways: int
    def axes(self):
        return {"mine": self.ways}
    def rules(self):
        return {"act_batch": ("mine",)}

def get_config(variant="eight"):
    ways = {"eight": 8, "two": 2}[variant]
    return Experiment(
        model=DecoderConfig(vocab_size=256, num_layers=1, embed_dim=32, num_heads=2,
                            num_kv_heads=2, head_dim=16, mlp_dim=64),
        batch=BatchConfig(global_batch=8, seq_len=16),
        strategies={"mine": Mine(ways)},
        targets=(f"cpu:{ways}",),
    )
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "config.py"
        path.write_text(text)
        return str(path)

    return write


def test_the_text_after_the_colon_is_the_variant(write):
    path = write(CONFIG)
    assert load_experiment(path).targets == ("cpu:8",)
    assert load_experiment(f"{path}:two").targets == ("cpu:2",)


def test_what_a_config_file_defines_reaches_a_process_that_never_saw_the_file(write):
    message = cloudpickle.dumps(load_experiment(write(CONFIG)))
    code = "import pickle, sys; e = pickle.load(sys.stdin.buffer); print(e.strategies['mine'])"
    done = subprocess.run([sys.executable, "-c", code], input=message, capture_output=True)
    assert done.stdout.decode().strip() == "Mine(ways=8)", done.stderr.decode()


@pytest.mark.parametrize(
    ("text", "variant", "message"),
    [
        pytest.param("x = (\n", "", r"config.py:1: SyntaxError: ", id="syntax"),
        pytest.param(
            "import nothing_like_it\n", "", r"config.py:1: ModuleNotFoundError", id="import"
        ),
        pytest.param("x = 1\n", "", r"defines no function get_config", id="no-get_config"),
        pytest.param("def get_config():\n    return {}\n", "", "returned dict", id="returns-dict"),
        pytest.param("def get_config():\n    1 / 0\n", "", r"config.py:2: ZeroDiv", id="raises"),
        pytest.param("raise SystemExit(3)\n", "", r"config.py:1: SystemExit: 3", id="exits"),
        pytest.param(
            "def get_config():\n    exit()\n", "", r"config.py:2: SystemExit", id="exits-late"
        ),
        pytest.param("def get_config():\n    pass\n", ":v", r"given the variant 'v'", id="variant"),
        pytest.param("def get_config(x):\n    pass\n", "", r"FILE.py:VARIANT", id="no-variant"),
        pytest.param(CONFIG, ":ten", r"config.py:16: KeyError: 'ten'", id="unknown-variant"),
        pytest.param(
            "from spmdlab.strategies import Data\n\nDATA = Data(0)\n",
            "",
            r"config.py:3: Data\(0\)",
            id="our-own-error",
        ),
    ],
)
def test_a_bad_file_is_one_line_that_says_where(write, text, variant, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load_experiment(write(text) + variant)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"'no/such\.py' does not exist"):
        load_experiment("no/such.py")


def test_experiments_are_plain_values():
    experiment = tiny()
    assert pickle.loads(pickle.dumps(experiment)) == experiment
    assert dataclasses.replace(experiment, seed=1) != experiment
