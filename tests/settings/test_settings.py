"""Tests of settings: layers, types, and one clear sentence per mistake."""

import re
from pathlib import Path

import pytest
from coded import raises_coded
from omegaconf import OmegaConf

from lightning_jax.settings import (
    HIDDEN,
    ConfigError,
    changed_keys,
    load_config,
    load_with_derived,
    save_config,
)
from lightning_jax.settings.errors import ALIASES, similar_keys
from lightning_jax.settings.schema import section_keys
from lightning_jax.train.config import Config


def test_later_layers_win(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("num_steps: 3\noptimizer:\n  learning_rate: 3e-6\n")
    config = load_config(Config, [str(tmp_path / "a.yaml"), "num_steps=5", "warmup.num_steps=0"])
    assert (config.num_steps, config.optimizer.learning_rate) == (5, 3e-6)
    assert config.total_steps == 5


@pytest.mark.parametrize(
    ("argument", "reason", "key"),
    [
        ("nmu_steps=3", "unknown", "nmu_steps"),
        ("num_steps=many", "wrong_type", "num_steps"),
        ("serve.slotz=1", "unknown", "serve.slotz"),
        ("serve.slots=0", "out_of_range", "serve.slots"),
        ("serve.prefix_cache_mib=-1", "out_of_range", "serve.prefix_cache_mib"),
        ("batch.head_chunk=7 batch.max_targets=1024", "conflict", "batch.head_chunk"),
        ("serve.max_len=128 batch.row_len=64", "conflict", "batch.row_len"),
        ("learning_rate=1e-5", "unknown", "learning_rate"),
        ("algorithm.loss=ppo", "unknown", "algorithm.loss"),
        ("algorithm.loss=gspo algorithm.clip_low=3e-4", "conflict", "algorithm.clip_low"),
        ("algorithm.loss=gspo algorithm.clip_high=9e-3", "conflict", "algorithm.clip_high"),
        ("algorithm.clip_dual=0.5", "invalid", "algorithm.clip_dual"),
        ("algorithm.kl_in=both", "unknown", "algorithm.kl_in"),
        ("algorithm.correction=truncate", "conflict", "algorithm.correction"),
        ("algorithm.correction_high=0.5", "conflict", "algorithm.correction_high"),
        (
            "algorithm.overlong_max_tokens=99 algorithm.overlong_buffer=100",
            "conflict",
            "algorithm.overlong_buffer",
        ),
        ("agent.function=spider", "invalid", "agent.function"),
        ("agent.command=''", "invalid", "agent.command"),
        ("agent.command=3", "wrong_type", "agent.command"),
        ('agent.command="say \'it"', "unbalanced_quotes", "agent.command"),
        ("agent.command='say \\'it'", "malformed", "agent.command"),
        ("agent.reward=score.py:reward", "conflict", "agent.reward"),
        ("policies.initial.trains=true", "invalid", "policies.initial"),
        ("policies.a.base=gpt2 model.lora.rank=1", "conflict", "policies.a.base"),
        (
            "policies.a={} algorithm.policy_updates=joint algorithm.value_heads=shared",
            "conflict",
            "algorithm.value_heads",
        ),
        (
            "policies.a={} roles.a={agent: a, policy: a} policies.aa.trains=false",
            "unused",
            "policies.aa",
        ),
        ("policies.a.trains=false model.lora.rank=1", "conflict", "policies"),
        ("roles.w={agent: w, policy: b}", "unknown", "roles.w.policy"),
        (
            "roles.w={agent: w, policy: b} policies.a={} model.lora.rank=1",
            "unknown",
            "roles.w.policy",
        ),
        (
            "roles.w={agent: w, policy: a, trains: false, served_by: initial}",
            "conflict",
            "roles.w.policy",
        ),
        (
            "policies.a.base=gpt2 roles.w={agent: w, trains: false, served_by: initial}",
            "conflict",
            "roles.w.served_by",
        ),
        (
            "policies.a={} model.lora.rank=1 serve.orchestrator=jetstream",
            "conflict",
            "serve.orchestrator",
        ),
        ("algorithm.value_heads=shared", "conflict", "algorithm.value_heads"),
        ("algorithm.policy_updates=both", "unknown", "algorithm.policy_updates"),
        ("missing.yaml", "not_found", "missing.yaml"),
        ("agent.command=${OPENAI_BASE_URL}/models", "unresolved", "agent.command"),
        ("eval=3", "wrong_type", "eval"),
    ],
)
def test_a_mistake_is_one_sentence(argument: str, reason: str, key: str) -> None:
    with raises_coded(ConfigError, reason, key) as caught:
        load_config(Config, re.split(r" (?=[a-z_]+\.)", argument))
    assert key.rpartition(".")[2] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "reason", "key"),
    [
        ("optimizer.mu_dtype=float16", "unknown", "optimizer.mu_dtype"),
        ("warmup.optimizer.mu_dtype=float16", "unknown", "warmup.optimizer.mu_dtype"),
        ("warmup.num_steps=-1", "out_of_range", "warmup.num_steps"),
        ("num_steps=-3", "out_of_range", "num_steps"),
        ("seed=-1", "out_of_range", "seed"),
        ("data.max_train_tasks=0", "out_of_range", "data.max_train_tasks"),
        ("eval.num_tasks=-1", "out_of_range", "eval.num_tasks"),
        ("optimizer.decay_steps=0", "out_of_range", "optimizer.decay_steps"),
        ("optimizer.b2=1", "out_of_range", "optimizer.b2"),
        ("rollout.temperature=-1", "out_of_range", "rollout.temperature"),
        ("rollout.top_p=0", "out_of_range", "rollout.top_p"),
        ("rollout.max_tokens=0", "out_of_range", "rollout.max_tokens"),
        ("rollout.agent_failure_reward=nan", "out_of_range", "rollout.agent_failure_reward"),
        ("model.activation_dtype=float16", "unknown", "model.activation_dtype"),
        ("model.lora.alpha=0", "out_of_range", "model.lora.alpha"),
        ("roles.writer={trains: true}", "conflict", "roles.writer.agent"),
        ("reward_rules.slip={fact: slip, reward: 1}", "unknown", "reward_rules.slip.fact"),
    ],
)
def test_a_wrong_value_is_named_by_its_whole_key(setting: str, reason: str, key: str) -> None:
    with raises_coded(ConfigError, reason, key) as caught:
        load_config(Config, [setting])
    assert key in str(caught.value)


def test_broken_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("num_steps: [1\n")
    with raises_coded(ConfigError, "malformed", str(tmp_path / "bad.yaml")) as caught:
        load_config(Config, [str(tmp_path / "bad.yaml")])
    assert "bad.yaml" in str(caught.value)
    path = str(tmp_path / "wrong.yaml")
    for text, reason, key, word in (
        (b"- 1\n", "wrong_type", path, "wrong.yaml"),
        (b"roles: [1]\n", "wrong_type", "roles", "wrong.yaml"),
        ("run_dir: \u00fc\n".encode("latin-1"), "malformed", path, "wrong.yaml"),
        (b"num_steps: ${nothing}\n", "unresolved", "num_steps", "nothing"),
    ):
        (tmp_path / "wrong.yaml").write_bytes(text)
        with raises_coded(ConfigError, reason, key) as caught:
            load_config(Config, [path])
        assert word in str(caught.value) and "\n" not in str(caught.value)


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
        "agent.options={env: docker, inner: {api_key: secret-4}}",
        f"roles.judge={role}",
    ]
    config = load_config(Config, given)
    save_config(config, path)
    assert not any(f"secret-{number}" in repr(config) for number in (1, 2, 3))
    text = path.read_text()
    assert "secret" not in text and "env: docker" in text
    assert text.count(HIDDEN) == 4 and path.stat().st_mode & 0o077 == 0
    assert changed_keys(path, config) == []
    assert changed_keys(path, load_config(Config, ["serve.api_key=other", *given[1:]])) == []
    keys = ("serve.api_key", "roles.judge.api_key", "agent.options.inner.api_key")
    with raises_coded(ConfigError, "missing", keys[-1]):
        load_config(Config, [str(path)])
    assert load_config(Config, [str(path)], only=["roles"]).roles["judge"].agent == "judge"
    with raises_coded(ConfigError, "invalid", "agent.env"):
        load_config(Config, [str(path), *(f"{key}=a" for key in keys)])
    again = [
        str(path),
        "serve.api_key=secret-1",
        "roles.judge.api_key=secret-2",
        "agent.options.inner.api_key=secret-4",
        "agent.env=[TOKEN=secret-3,NAME]",
    ]
    assert load_config(Config, again) == config


def test_a_setting_that_is_wrong_does_not_show_a_secret() -> None:
    with raises_coded(ConfigError, "malformed", "serve.api_key") as caught:
        load_config(Config, ["serve.api_key=[k1"])
    assert "k1" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "model: {name", "- a\n"])
def test_damaged_settings_of_a_run_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with raises_coded(ConfigError, "malformed", str(path)) as caught:
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
    with raises_coded(ConfigError, "missing", "data.root"):
        load_config(Config, [str(path)])


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
    ("text", "name"),
    [("base: gone.yaml\n", "gone.yaml"), ("base: [a.yaml]\n", "['a.yaml']")],
)
def test_a_base_that_is_no_file(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "top.yaml").write_text(text)
    with raises_coded(ConfigError, "not_found", str(tmp_path / name)) as caught:
        load_config(Config, [str(tmp_path / "top.yaml")])
    assert str(tmp_path / "top.yaml") in str(caught.value)


def test_null_removes_what_a_base_names(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "prompts: {ask: Be brief., hint: Think.}\n"
        "reward_rules: {late: {fact: tool_timeout, reward: -1}}\n"
    )
    (tmp_path / "top.yaml").write_text(
        "base: base.yaml\nprompts: {hint: null}\nreward_rules: {late: null}\n"
    )
    config = load_config(Config, [str(tmp_path / "top.yaml")])
    assert config.prompts == {"ask": "Be brief."}
    assert config.reward_rules == {}
    save_config(config, tmp_path / "config.yaml")
    assert load_config(Config, [str(tmp_path / "config.yaml")]) == config


def test_null_for_a_name_that_no_base_has_is_refused() -> None:
    setting = "reward_rules.late.fact=tool_timeout"
    with raises_coded(ConfigError, "not_found", "reward_rules.latte"):
        load_config(Config, [setting, "reward_rules.late.reward=-1", "reward_rules.latte=null"])


@pytest.mark.parametrize(
    "setting", ["agent.command=node 'my agent.mjs' 3", "agent.command=[node, my agent.mjs, 3]"]
)
def test_a_command_is_a_line_or_its_words(setting: str, tmp_path: Path) -> None:
    config = load_config(Config, [setting])
    assert config.agent.command == ("node", "my agent.mjs", "3")
    save_config(config, tmp_path / "config.yaml")
    assert load_config(Config, [str(tmp_path / "config.yaml")]) == config


def test_an_interpreter_beside_a_command_is_refused() -> None:
    with raises_coded(ConfigError, "conflict", "agent.python"):
        load_config(Config, ["agent.command=node agent.mjs", "agent.python=python3"])


def test_sections_that_are_not_asked_for_may_be_of_another_release(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("model:\n  name: mine\nrollout:\n  no_longer: 1\n")
    assert load_config(Config, [str(path)], only=["model", "algorithm"]).model.name == "mine"
    with raises_coded(ConfigError, "unknown", "rollout.no_longer"):
        load_config(Config, [str(path)], only=["model", "rollout"])


@pytest.mark.parametrize(
    ("settings", "sizes", "buckets"),
    [
        ("serve.max_len=64", (512, 1024, 256), (32,)),
        ("", (1024, 1024, 256), (32, 128, 512)),
        ("serve.max_len=1500", (1500, 1536, 256), (32, 128, 512)),
        ("serve.max_len=512 batch.head_chunk=100", (512, 1100, 100), (32, 128)),
        ("batch.max_targets=1000", (1024, 1000, 250), (32, 128, 512)),
        ("batch.max_targets=509", (1024, 509, 509), (32, 128, 512)),  # a prime
        ("batch.row_len=4096 serve.prefill_buckets=[64]", (4096, 4096, 256), (64,)),
        ("batch.row_len=300", (300, 1024, 256), (32, 128)),
    ],
)
def test_sizes_follow_from_others(
    settings: str, sizes: tuple[int, int, int], buckets: tuple[int, ...], tmp_path: Path
) -> None:
    config, derived = load_with_derived(Config, settings.split())
    batch = config.batch
    assert (batch.row_len, batch.max_targets, batch.largest_chunk) == sizes
    assert config.serve.prefill_buckets == buckets
    assert config.serve.max_len <= batch.row_len
    given = {setting.partition("=")[0] for setting in settings.split()}
    names = ("batch.row_len", "batch.max_targets", "serve.prefill_buckets", "serve.max_len")
    assert derived.keys() == {*names} - given
    save_config(config, tmp_path / "config.yaml")
    assert OmegaConf.load(tmp_path / "config.yaml").batch.row_len == sizes[0]
    assert load_with_derived(Config, [str(tmp_path / "config.yaml")]) == (config, {})


def test_names_of_other_programs_are_none_of_ours_and_lead_to_settings() -> None:
    known = set(section_keys(Config))
    assert {key for keys in ALIASES.values() for key in keys} <= known
    assert not ALIASES.keys() & {key.rpartition(".")[2] for key in known}


@pytest.mark.parametrize(
    ("key", "similar"),
    [
        ("learning_rate", ["optimizer.learning_rate", "warmup.optimizer.learning_rate"]),
        ("serve.slotz", ["serve.slots"]),
        ("optimiser", ["optimizer"]),
        ("polcy", ["policies"]),
        ("entropy", ["algorithm.entropy_coef"]),
        ("optimizer.lr", ["optimizer.learning_rate", "warmup.optimizer.learning_rate"]),
        ("optimizer.learning_rte", ["optimizer.learning_rate"]),
        ("algorithm.epochs", ["algorithm.num_epochs"]),
        ("algorithm.kl", ["algorithm.kl_in", "algorithm.kl_coef"]),
        ("max_new_tokens", ["rollout.max_tokens"]),
        ("model.path", ["model.name"]),
        ("optimizer.xyz", []),
        ("zebra", []),
    ],
)
def test_an_unknown_key_is_answered_with_those_that_may_be_meant(
    key: str, similar: list[str], tmp_path: Path
) -> None:
    assert similar_keys(key, Config)[: len(similar) or None] == similar
    (tmp_path / "c.yaml").write_text(OmegaConf.to_yaml(OmegaConf.from_dotlist([f"{key}=1"])))
    for argument in (f"{key}=1", str(tmp_path / "c.yaml")):
        with raises_coded(ConfigError, "unknown", key) as caught:
            load_config(Config, [argument])
        assert all(name in str(caught.value) for name in similar)
