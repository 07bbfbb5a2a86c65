"""The commands that run an agent without training it: `lightning-jax try` and `eval`.

Nothing heavy is imported before a command runs.
"""

from lightning_jax.cli.policy_command import EvalArguments, TryArguments


class Try(TryArguments):
    """Run the agent of a config on one task and show its rollout, with the reward.

    Without FILE, use config.yaml. The exit code is 1 if an attempt failed.
    """

    def run(self) -> int:
        config, source = self.load()
        from lightning_jax.cli.try_agent import try_agent

        return try_agent(config, source, self)


class Eval(EvalArguments):
    """Score a policy on tasks without training, and compare it with an earlier result.

    Without FILE, use config.yaml.
    """

    def run(self) -> int:
        config, source = self.load()
        from lightning_jax.cli.evaluate import evaluate

        evaluate(config, source, self)
        return 0
