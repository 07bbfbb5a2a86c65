"""Tests of settings: layers, types, and one clear sentence per mistake."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_jax.config import (
    HIDDEN,
    Config,
    ConfigError,
    changed_keys,
    load_config,
    save_config,
)


def test_later_layers_win(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("num_steps: 3\noptimizer:\n  learning_rate: 3e-6\n")
    config = load_config(Config, [str(tmp_path / "a.yaml"), "num_steps=5", "warmup.num_steps=0"])
    assert (config.num_steps, config.optimizer.learning_rate) == (5, 3e-6)
    assert config.total_steps == 5


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("nmu_steps=3", ["nmu_steps", "num_steps"]),
        ("num_steps=many", ["num_steps", "many"]),
        ("serve.slotz=1", ["serve.slotz", "slots"]),
        ("serve.slots=0", ["slots is 0", "at least 1"]),
        ("serve.prefix_cache_mib=-1", ["prefix_cache_mib is -1", "0 for no prefix cache"]),
        ("batch.head_chunk=7", ["head_chunk is 7", "divisor"]),
        ("algorithm.loss=ppo", ["loss is 'ppo'", "clip, gspo, cispo, reinforce or dpo"]),
        (
            "algorithm.loss=gspo algorithm.clip_low=3e-4",
            ["clip_low is 0.0003", "at least 0.01", "set proximal to old"],
        ),
        ("algorithm.loss=gspo algorithm.clip_high=9e-3", ["clip_high is 0.009", "at least 0.01"]),
        ("algorithm.clip_dual=0.5", ["clip_dual is 0.5", "above 1, or 0"]),
        ("algorithm.kl_in=both", ["kl_in is 'both'", "loss or reward"]),
        ("algorithm.correction=truncate", ["correction is 'truncate'", "set proximal to old"]),
        ("algorithm.correction_high=0.5", ["correction_high is 0.5", "correction_low=0.5"]),
        ("algorithm.overlong_buffer=9999", ["overlong_buffer is 9999", "1024"]),
        ("agent.function=spider", ["function is 'spider'", "FILE:FUNCTION"]),
        ("agent.command=''", ["command is ()", "a command line"]),
        ("agent.command=3", ["command is 3", "a command line"]),
        ('agent.command="say \'it"', ["cannot be split", "No closing quotation"]),
        ("agent.command='say \\'it'", ["say", "is not readable YAML"]),
        ("agent.reward=score.py:reward", ["reward is 'score.py:reward'", "beside agent.command"]),
        ("rollout.agent=a.py:run", ["rollout.agent", "it is agent.function now"]),
        ("policies.initial.trains=true", ["the name 'initial'", "ask for it as their model"]),
        (
            "policies.a.base=gpt2 model.lora.rank=1",
            ["policies.a.base is 'gpt2'", "smollm2-135m-instruct", "adapters on model.name"],
        ),
        (
            "policies.a={} algorithm.policy_updates=joint algorithm.value_heads=shared",
            ["value_heads is 'shared' and a have weights of their own", "expected per_policy"],
        ),
        (
            "policies.a={} roles.a={agent: a, policy: a} policies.aa.trains=false",
            ["policies.aa is the policy of no role", "roles name a;", "{model: aa, policy: aa}"],
        ),
        ("policies.a.trains=false model.lora.rank=1", ["trains is false for all"]),
        ("roles.w={agent: w, policy: b}", ["roles.w.policy is 'b'", "without a section policies"]),
        (
            "roles.w={agent: w, policy: b} policies.a={} model.lora.rank=1",
            ["roles.w.policy is 'b'", "one of a"],
        ),
        (
            "roles.w={agent: w, policy: a, trains: false, served_by: initial}",
            ["policy is 'a'", "served_by is initial"],
        ),
        (
            "policies.a.base=gpt2 roles.w={agent: w, trains: false, served_by: initial}",
            ["roles.w.served_by is 'initial'", "policies.a begins as 'gpt2'", "roles.w.policy"],
        ),
        (
            "policies.a={} model.lora.rank=1 serve.orchestrator=jetstream",
            ["orchestrator is 'jetstream' with several policies", "expected native"],
        ),
        ("algorithm.value_heads=shared", ["value_heads is 'shared'", "per_policy"]),
        ("algorithm.policy_updates=both", ["policy_updates is 'both'", "independent or joint"]),
        ("missing.yaml", ["missing.yaml", "does not exist"]),
        ("agent.command=${OPENAI_BASE_URL}/models", ["OPENAI_BASE_URL", r"write \${...}"]),
        ("eval=3", ["eval"]),
    ],
)
def test_a_mistake_is_one_sentence(argument: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, re.split(r" (?=[a-z_]+\.)", argument))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("optimizer.mu_dtype=float16", "optimizer.mu_dtype is 'float16'"),
        ("warmup.optimizer.mu_dtype=float16", "warmup.optimizer.mu_dtype is 'float16'"),
        ("warmup.num_steps=-1", "warmup.num_steps is -1"),
        ("num_steps=-3", "num_steps is -3"),
        ("seed=-1", "seed is -1"),
        ("data.max_train_tasks=0", "data.max_train_tasks is 0"),
        ("eval.num_tasks=-1", "eval.num_tasks is -1"),
        ("optimizer.decay_steps=0", "optimizer.decay_steps is 0"),
        ("optimizer.b2=1", "optimizer.b2 is 1.0"),
        ("rollout.temperature=-1", "rollout.temperature is -1.0"),
        ("rollout.top_p=0", "rollout.top_p is 0.0"),
        ("rollout.max_tokens=0", "rollout.max_tokens is 0"),
        ("rollout.agent_failure_reward=nan", "rollout.agent_failure_reward is nan"),
        ("model.activation_dtype=float16", "model.activation_dtype is 'float16'"),
        ("model.lora.alpha=0", "model.lora.alpha is 0.0"),
        ("roles.writer={trains: true}", "roles.writer.agent is None"),
        ("reward_rules.slip={fact: slip, reward: 1}", "reward_rules.slip.fact is 'slip'"),
    ],
)
def test_a_wrong_value_is_named_by_its_whole_key(setting: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, [setting])
    assert str(caught.value).startswith(f"{key}; expected ")


def test_broken_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("num_steps: [1\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(Config, [str(tmp_path / "bad.yaml")])
    for text, words in (
        (b"- 1\n", "wrong.yaml has a list"),
        (b"roles: [1]\n", "wrong.yaml has a list"),
        ("run_dir: \u00fc\n".encode("latin-1"), "wrong.yaml is not readable YAML"),
        (b"num_steps: ${nothing}\n", "nothing"),
    ):
        (tmp_path / "wrong.yaml").write_bytes(text)
        with pytest.raises(ConfigError) as caught:
            load_config(Config, [str(tmp_path / "wrong.yaml")])
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_saved_settings_load_again_and_differences_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = load_config(Config, ["serve.prefill_buckets=[32,8]"])
    assert changed_keys(path, config) == []
    save_config(config, path)
    assert load_config(Config, [str(path)]) == config
    assert changed_keys(path, config) == []
    other = load_config(Config, ["serve.prefill_buckets=[32,8]", "optimizer.learning_rate=1.0"])
    assert changed_keys(path, other) == ["optimizer.learning_rate"]


def test_secrets_are_not_saved_and_are_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    role = "{agent: judge, served_by: 'https://x.example', trains: false, api_key: secret-2}"
    given = [
        *("serve.api_key=secret-1", "agent.env=[TOKEN=secret-3,NAME]"),
        f"roles.judge={role}",
    ]
    config = load_config(Config, given)
    save_config(config, path)
    assert "secret" not in repr(config)
    text = path.read_text()
    assert not any(secret in text for secret in ("secret-1", "secret-2", "secret-3"))
    assert text.count(HIDDEN) == 3 and path.stat().st_mode & 0o077 == 0
    assert changed_keys(path, config) == []
    assert changed_keys(path, load_config(Config, ["serve.api_key=other", *given[1:]])) == []
    with pytest.raises(ConfigError, match=r"roles\.judge\.api_key"):
        load_config(Config, [str(path)])
    assert load_config(Config, [str(path)], only=["roles"]).roles["judge"].agent == "judge"
    with pytest.raises(ConfigError, match=r"env"):
        load_config(Config, [str(path), "serve.api_key=a", "roles.judge.api_key=b"])
    again = [
        str(path),
        "serve.api_key=secret-1",
        "roles.judge.api_key=secret-2",
        "agent.env=[TOKEN=secret-3,NAME]",
    ]
    assert load_config(Config, again) == config


def test_a_setting_that_is_wrong_does_not_show_a_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, ["serve.api_key=[k1"])
    assert "k1" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "model: {name", "- a\n"])
def test_damaged_settings_of_a_run_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged") as caught:
        changed_keys(path, Config())
    assert "\n" not in str(caught.value)


def test_a_setting_that_the_run_did_not_know_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    save_config(Config(seed=1), path)
    old = OmegaConf.load(path)
    del old.agent["max_processes"]
    OmegaConf.save(old, path)
    assert changed_keys(path, Config(seed=1)) == []
    assert changed_keys(path, load_config(Config, ["seed=1", "agent.max_processes=5"])) == [
        "agent.max_processes"
    ]


def test_a_file_may_ask_for_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "asks.yaml"
    path.write_text("data:\n  root: ???\nseed: 7\n")
    for argv in (["data.root=DIR", str(path)], [str(path), "data.root=DIR"]):
        assert load_config(Config, argv).data.root == "DIR"
    assert load_config(Config, [str(path), "data.root=null"]).data.root is None
    with pytest.raises(ConfigError) as caught:
        load_config(Config, [str(path)])
    assert (
        str(caught.value) == "data.root is left to be set by one of the files; add data.root=VALUE."
    )


def test_a_path_may_hold_an_equals_sign(tmp_path: Path) -> None:
    path = tmp_path / "lr=1" / "config.yaml"
    path.parent.mkdir()
    path.write_text("num_steps: 3\n")
    assert load_config(Config, [str(path), "seed=7"]) == Config(num_steps=3, seed=7)


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("run_dir: ~/runs/first\nagent:\n  command: [~/bin/mine, '~']")
    config = load_config(Config, [str(tmp_path / "c.yaml"), "data.root=~/tasks.jsonl"])
    assert config.run_dir == f"{tmp_path}/runs/first"
    assert config.data.root == f"{tmp_path}/tasks.jsonl"
    assert config.agent.command == (f"{tmp_path}/bin/mine", "~")


def test_a_file_may_stand_on_another(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    files = {
        "low.yaml": "num_steps: 3\nseed: 1\nrun_dir: low\n",
        "sub/middle.yaml": "base: ../low.yaml\nseed: 2\nrun_dir: middle\n",
        "sub/top.yaml": "base: middle.yaml\nrun_dir: top\n",
        "other.yaml": "num_steps: 9\nrun_dir: other\n",
        "circle.yaml": "base: sub/../circle.yaml\nseed: 5\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def loaded(*names: str) -> Config:
        return load_config(Config, [str(tmp_path / n) if n in files else n for n in names])

    assert loaded("sub/top.yaml") == Config(num_steps=3, seed=2, run_dir="top")
    assert loaded("sub/top.yaml", "seed=4") == Config(num_steps=3, seed=4, run_dir="top")
    # A base file named earlier is not read again, so settings after it stay.
    assert loaded("low.yaml", "other.yaml", "sub/top.yaml") == Config(
        num_steps=9, seed=2, run_dir="top"
    )
    assert loaded("other.yaml", "sub/top.yaml") == Config(num_steps=3, seed=2, run_dir="top")
    assert loaded("circle.yaml") == Config(seed=5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: gone.yaml\n", r"top.yaml has base: gone.yaml, but \S*gone.yaml does not exist"),
        ("base: [a.yaml]\n", r"top.yaml has base: \['a.yaml'\], but"),
    ],
)
def test_a_base_that_is_no_file(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "top.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(Config, [str(tmp_path / "top.yaml")])


@pytest.mark.parametrize(
    "setting", ["agent.command=node 'my agent.mjs' 3", "agent.command=[node, my agent.mjs, 3]"]
)
def test_a_command_is_a_line_or_its_words(setting: str, tmp_path: Path) -> None:
    config = load_config(Config, [setting])
    assert config.agent.command == ("node", "my agent.mjs", "3")
    save_config(config, tmp_path / "config.yaml")
    assert load_config(Config, [str(tmp_path / "config.yaml")]) == config


def test_an_interpreter_beside_a_command_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"python is 'python3'; expected none beside"):
        load_config(Config, ["agent.command=node agent.mjs", "agent.python=python3"])


def test_sections_that_are_not_asked_for_may_be_of_another_release(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("model:\n  name: mine\nrollout:\n  no_longer: 1\n")
    assert load_config(Config, [str(path)], only=["model", "algorithm"]).model.name == "mine"
    with pytest.raises(ConfigError, match="no_longer"):
        load_config(Config, [str(path)], only=["model", "rollout"])
