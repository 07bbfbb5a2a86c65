# Codex on one task, the first argument. Its standard input is empty, because what comes there
# becomes part of its prompt. The sandbox of the task takes the place of its own. With --json its
# last line says why it failed.
here=$(dirname "$0")
mkdir -p ~/.codex
cp "$here/config.toml" ~/.codex/
exec codex exec --json --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check \
  -c "model_instructions_file='$here/prompt.md'" \
  -c "model_providers.policy.base_url='$OPENAI_BASE_URL'" -- "$1" </dev/null 2>&1
